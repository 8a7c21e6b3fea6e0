"""Where a request resumes, what it loads from where, and which boundaries lack a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cache.index import Index
from cache.retention.protocol import Kind
from cache.tier import ALL_TIERS, Tier, fastest
from cache.tokens import Tokens
from cache.view import View, merge, view


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan may use.

    Attributes:
        grid: tokens between the places where a prefill can cut a checkpoint. On the kernels' chunk, 64, a resumed
            prefill has the bits of a cold one; 1 cuts anywhere.
        tiers: the set of tiers to load from.
        most: most checkpoints that one prefill makes; None for any number.
        nbytes: most bytes of recurrent state that one prefill makes; None for any number.
        state_nbytes: bytes of one checkpoint's recurrent state, for `nbytes`.
    """

    grid: int = 64
    tiers: int = ALL_TIERS
    most: int | None = None
    nbytes: int | None = None
    state_nbytes: int = 0

    def __post_init__(self) -> None:
        if self.grid < 1:
            raise ValueError(f"{self.grid=} must be positive: 64 keeps bits, 1 cuts anywhere")
        if any(limit is not None and limit < 0 for limit in (self.most, self.nbytes)):
            raise ValueError(f"{self.most=} and {self.nbytes=} must not be negative; None sets no limit")

    def floor(self, tokens: int) -> int:
        """The last place at or before `tokens` where a checkpoint can be cut."""
        return tokens // self.grid * self.grid


class Source(NamedTuple):
    """Latent rows `[start, stop)` are loaded from `tier`."""

    start: int
    stop: int
    tier: Tier


class Missing(NamedTuple):
    """A boundary without a checkpoint that this request's prefill passes: filled once, it serves whoever comes next."""

    boundary: int
    kind: Kind


class ResumePlan(NamedTuple):
    """How a request starts.

    Attributes:
        boundary: tokens that are not computed again; 0 for a cold start. Below the number of tokens, always: the
            last one is computed for its logits.
        key: of the boundary, to pin; None for a cold start or where only a remote store knows it.
        state: the tier that the checkpoint comes from; None for a cold start.
        rows: where the latents `[0, boundary)` come from. Those of an unfinished last page lie in the checkpoint.
        latent_hit: rows that are held without a gap, however few checkpoints there are.
        state_hit: the deepest checkpoint that is held, however few latents there are.
        missing: boundaries beyond `boundary` to fill, shallow to deep.
        held: boundaries beyond it that are held whole, and that the last token alone puts out of reach.
    """

    boundary: int
    key: bytes | None
    state: Tier | None
    rows: tuple[Source, ...]
    latent_hit: int
    state_hit: int
    missing: tuple[Missing, ...]
    held: tuple[int, ...]


def plan(tokens: Tokens, index: Index, limits: Limits, remote: View | None = None) -> ResumePlan:
    """Plans a request against an index, and against what a remote store was found to hold of this prompt."""
    local = view(index, tokens)
    return resume(merge(local, remote) if remote else local, len(tokens), index.page, limits)


def resume(seen: View, num_tokens: int, page: int, limits: Limits) -> ResumePlan:
    """Plans a request from what is held of its prompt.

    The boundary is the deepest below `num_tokens` whose checkpoint and whose latents are both held: an intersection of
    sets, never the smaller of two lengths.

    Raises:
        ValueError: without tokens.
    """
    if num_tokens < 1:
        raise ValueError(f"{num_tokens=}: a request has a token to compute")
    last, tiers = num_tokens - 1, limits.tiers
    covered = seen.covered(tiers)
    states = [item for item in seen.boundaries if item.tiers & tiers]
    whole = [item for item in states if item.boundary // page * page <= covered]
    hits = [item for item in whole if item.boundary <= last]
    boundary = hits[-1].boundary if hits else 0
    latent_hit = min(covered, last)
    return ResumePlan(
        boundary=boundary,
        key=hits[-1].key if hits else None,
        state=fastest(hits[-1].tiers & tiers) if hits else None,
        rows=_sources(seen, boundary // page * page, tiers),
        latent_hit=latent_hit,
        state_hit=next((item.boundary for item in reversed(states) if item.boundary <= last), 0),
        missing=_missing(seen, boundary, last, latent_hit, limits),
        held=tuple(item.boundary for item in whole if item.boundary > boundary),
    )


def _sources(seen: View, stop: int, tiers: int) -> tuple[Source, ...]:
    """The fastest tier of each row before `stop`."""
    sources: list[Source] = []
    for rows in seen.rows:
        if rows.start >= stop:
            break
        source = Source(rows.start, min(rows.stop, stop), fastest(rows.tiers & tiers))
        if sources and sources[-1].tier == source.tier:
            source = source._replace(start=sources.pop().start)
        sources.append(source)
    return tuple(sources)


def _missing(seen: View, boundary: int, last: int, latent_hit: int, limits: Limits) -> tuple[Missing, ...]:
    """Boundaries worth a checkpoint: every one remembered, and where this prompt leaves what is known of it."""
    grid = limits.grid
    ends = [item.boundary // grid * grid for item in seen.boundaries if boundary < item.boundary <= last]
    found = dict.fromkeys(ends, Kind.MISSING)
    parting = min(max(seen.length, latent_hit), last)
    found.setdefault(limits.floor(parting), Kind.MISSING if latent_hit > seen.length else Kind.BRANCH)
    return tuple(Missing(at, kind) for at, kind in sorted(found.items()) if at > boundary)
