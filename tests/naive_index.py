"""The prefix index as a list of boundaries and a set of pages: slow, and plainly right. The oracle of cache.index."""

from __future__ import annotations

from typing import NamedTuple

from cache.tier import Tier
from cache.view import Rows, Seen, View

Prefix = tuple[int, ...]


class Boundary(NamedTuple):
    """One boundary, by the tokens before it."""

    tokens: Prefix
    key: bytes
    states: frozenset[Tier] = frozenset()
    pins: int = 0
    last_use: float = 0.0


def common(a: Prefix, b: Prefix) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class NaiveIndex(NamedTuple):
    """What cache.index.Index does, said with sets. A page is the tokens up to its end; a boundary's id its tokens."""

    page: int
    boundaries: tuple[Boundary, ...] = ()
    pages: frozenset[tuple[Prefix, Tier]] = frozenset()

    def insert(self, tokens: Prefix, key: bytes, now: float) -> NaiveIndex:
        old = self.find(tokens)
        new = old._replace(last_use=now) if old else Boundary(tokens, key, last_use=now)
        return self._replace(boundaries=(*(b for b in self.boundaries if b.tokens != tokens), new))

    def find(self, tokens: Prefix) -> Boundary | None:
        return next((b for b in self.boundaries if b.tokens == tokens), None)

    def remove(self, tokens: Prefix) -> NaiveIndex:
        return self._replace(boundaries=tuple(b for b in self.boundaries if b.tokens != tokens))

    def hold(self, tokens: Prefix, tier: Tier) -> NaiveIndex:
        return self._change(tokens, states=self._at(tokens).states | {tier})._replace(
            pages=self.pages | {(tokens[:end], tier) for end in self._ends(tokens)}
        )

    def release(self, tokens: Prefix, tier: Tier) -> tuple[NaiveIndex, set[Prefix]]:
        index, freed = self._change(tokens, states=self._at(tokens).states - {tier})._trimmed()
        return index, {prefix for prefix, _ in freed}

    def pin(self, tokens: Prefix) -> NaiveIndex:
        return self._change(tokens, pins=self._at(tokens).pins + 1)

    def unpin(self, tokens: Prefix) -> tuple[NaiveIndex, set[tuple[Prefix, Tier]]]:
        return self._change(tokens, pins=self._at(tokens).pins - 1)._trimmed()

    def strip(self, lost: Prefix, start: int, tier: Tier) -> tuple[NaiveIndex, set[bytes], set[Prefix]]:
        """A page is lost: so are all behind it, those between `start` and it, and those that nothing needs any more."""
        behind = [b for b in self.boundaries if b.tokens[: len(lost)] == lost]
        keys = {b.key for b in behind if tier in b.states}
        gone = {
            (prefix, held)
            for prefix, held in self.pages
            if held == tier and start < common(prefix, lost) == min(len(prefix), len(lost))
        }
        index = self._replace(pages=self.pages - gone)
        for b in behind:
            index = index._change(b.tokens, states=b.states - {tier})
        index, freed = index._trimmed()
        return index, keys, {prefix for prefix, _ in gone | freed}

    def view(self, tokens: Prefix) -> View:
        length = max((common(tokens, b.tokens) for b in self.boundaries), default=0)
        rows: list[Rows] = []
        for end in self._ends(tokens[:length]):
            tiers = sum(tier.bit for tier in Tier if (tokens[:end], tier) in self.pages)
            if tiers and rows and rows[-1].stop == end - self.page and rows[-1].tiers == tiers:
                rows[-1] = rows[-1]._replace(stop=end)
            elif tiers:
                rows.append(Rows(end - self.page, end, tiers))
        passed = sorted(
            (b for b in self.boundaries if b.tokens == tokens[: len(b.tokens)]), key=lambda b: len(b.tokens)
        )
        seen = (Seen(len(b.tokens), sum(t.bit for t in b.states), b.key) for b in passed)
        return View(length, tuple(rows), tuple(seen))

    def parent(self, tokens: Prefix) -> bytes | None:
        before = [b for b in self.boundaries if b.tokens != tokens and b.tokens == tokens[: len(b.tokens)]]
        return max(before, key=lambda b: len(b.tokens)).key if before else None

    def children(self, tokens: Prefix) -> set[bytes]:
        behind = {
            b.tokens for b in self.boundaries if b.tokens[: len(tokens)] == tokens and b.tokens != tokens
        }
        nearest = {t for t in behind if not any(t[:n] in behind for n in range(len(tokens) + 1, len(t)))}
        return {b.key for b in self.boundaries if b.tokens in nearest}

    def _ends(self, tokens: Prefix) -> range:
        return range(self.page, len(tokens) + 1, self.page)

    def _at(self, tokens: Prefix) -> Boundary:
        found = self.find(tokens)
        assert found is not None
        return found

    def _change(self, tokens: Prefix, **changes: object) -> NaiveIndex:
        changed = (b._replace(**changes) if b.tokens == tokens else b for b in self.boundaries)  # type: ignore[arg-type]
        return self._replace(boundaries=tuple(changed))

    def _trimmed(self) -> tuple[NaiveIndex, set[tuple[Prefix, Tier]]]:
        """Without the pages that no checkpoint of their tier and no pin lies behind."""
        freed = {
            (prefix, tier)
            for prefix, tier in self.pages
            if not any(
                b.tokens[: len(prefix)] == prefix and (tier in b.states or b.pins) for b in self.boundaries
            )
        }
        return self._replace(pages=self.pages - freed), freed
