"""A device whose model is a rolling hash: pages and slots hold hashes, so that a stale one gives another token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from cache.tier import Tier
from kda_jax.engine.scheduler import Scheduler
from kda_jax.engine.work import Chunk, Load, Restore, Results, Row, Sampled, Snapshot, Work
from rolling_model import ROW_NBYTES, digest

VOCAB = 3


class Violation(AssertionError):
    """A law does not hold."""


def require(true: bool, law: str) -> None:
    if not true:
        raise Violation(law)


class HostBytes(NamedTuple):
    """What a page or a state is outside of the pool."""

    nbytes: int
    content: Any


def advance(state: bytes, token: int) -> tuple[bytes, bytes]:
    """The state behind a token, and the token's latent row."""
    state = digest(state, token.to_bytes(4, "little"))
    return state, digest(b"row", state, size=ROW_NBYTES)


def sample(state: bytes, rows: Sequence[bytes]) -> Sampled:
    """The next token, of the state and of every row before it."""
    answer = digest(b"answer", state, *rows)
    return Sampled(answer[0] % VOCAB, answer[1] % 12 == 0)


@lru_cache(maxsize=4096)
def cold(namespace: bytes, prompt: tuple[int, ...], most: int) -> tuple[int, ...]:
    """What an undisturbed run of a request generates."""
    state, rows, tokens = digest(namespace), [], list(prompt)
    for at in range(len(prompt) + most):
        state, row = advance(state, tokens[at])
        rows.append(row)
        if at + 1 >= len(prompt):
            now = sample(state, rows)
            tokens.append(now.token)
            if now.last or len(tokens) == len(prompt) + most:
                break
    return tuple(tokens[len(prompt) :])


@lru_cache(maxsize=65536)
def truth(namespace: bytes, tokens: bytes) -> tuple[bytes, tuple[bytes, ...]]:
    """The state behind tokens (bytes of int32), and their rows."""
    if not tokens:
        return digest(namespace), ()
    state, rows = truth(namespace, tokens[:-4])
    state, row = advance(state, int.from_bytes(tokens[-4:], "little"))
    return state, (*rows, row)


class Device:
    """Pages and slots, and what work does to them."""

    def __init__(
        self, scheduler: Scheduler, num_pages: int, num_slots: int, remote: Mapping[bytes, Any] | None = None
    ) -> None:
        """`remote` has what lies in a remote store, pages and states by name."""
        self.remote = {} if remote is None else remote
        self.scheduler, self.rows = scheduler, scheduler.sizes.rows
        self.pages: list[Any] = [None] * num_pages
        self.slots: list[Any] = [b"left over"] * num_slots

    def execute(self, work: Work, failing: frozenset[int]) -> Results:
        """A step. Of a request that fails some is written, and all of it is wrong."""
        self.lent = {
            page
            for each in (*work.snapshots, *(each for chunk in work.chunks for each in chunk.snapshots))
            for page in each.pages
        }
        sampled: dict[int, Sampled] = {}
        for snapshot in work.snapshots:
            self.snapshot(snapshot, snapshot.id in failing)
        for zero in work.zeros:
            self.slots[zero.slot] = b"wrong" if zero.id in failing else None
        for restore in work.restores:
            self.restore(restore)
        for chunk in work.chunks:
            self.chunk(chunk, chunk.id in failing, sampled)
        for row in work.rows:
            self.row(row, row.id in failing, sampled)
        return Results(sampled, failing)

    def namespace(self, id: int) -> bytes:
        return self.scheduler.live[id].request.namespace

    def state(self, id: int, slot: int) -> bytes:
        self.check_slot(id, slot)
        return digest(self.namespace(id)) if self.slots[slot] is None else self.slots[slot]

    def check_slot(self, id: int, slot: int) -> None:
        live = self.scheduler.live.get(id)
        require(
            slot != 0 and live is not None and live.slot == slot, "a slot is used by whom it was given to"
        )

    def write_row(self, id: int, table: Sequence[int], position: int, row: bytes) -> None:
        page = table[position // self.rows]
        self.check_page(id, page)
        if not isinstance(self.pages[page], list):
            self.pages[page] = [None] * self.rows
        self.pages[page][position % self.rows] = row

    def check_page(self, id: int, page: int) -> None:
        live = self.scheduler.live.get(id)
        mine = live is not None and page in live.table
        alone = self.scheduler.pool.pages.holders[page] == 1
        require(page != 0 and mine and alone, "a page is written by its owner alone")

    def read_rows(self, table: Sequence[int], stop: int) -> list[Any]:
        pages = (self.pages[page] for page in table[: -(-stop // self.rows)])
        return [row for page in pages for row in (page if isinstance(page, list) else [b"?"] * self.rows)][
            :stop
        ]

    def snapshot(self, snapshot: Snapshot, failing: bool = False) -> None:
        state = b"wrong" if failing else self.state(snapshot.id, snapshot.slot)
        whole = snapshot.boundary // self.rows * self.rows
        tail = tuple(self.read_rows(snapshot.table, snapshot.boundary)[whole:])
        for part, page in enumerate(snapshot.pages):
            holders = self.scheduler.pool.pages.holders[page]
            require(page != 0 and page in self.lent and holders == 1, "a snapshot goes to pages taken for it")
            self.pages[page] = (part, len(snapshot.pages), state, tail)

    def restore(self, restore: Restore) -> None:
        parts = [self.pages[page] for page in restore.pages]
        whole = [part for part in parts if isinstance(part, tuple)]
        require(
            [part[0] for part in whole] == list(range(len(parts))) and len({part[2:] for part in whole}) == 1,
            "a state is read from pages that hold one",
        )
        self.bring(restore.id, restore.slot, restore.boundary, restore.tail, whole[0][2:])

    def bring(self, id: int, slot: int, boundary: int, tail: int | None, content: Any) -> None:
        """A state into its slot, and the rows of its unfinished page."""
        self.check_slot(id, slot)
        self.slots[slot], rows = content
        require(len(rows) == boundary % self.rows and bool(rows) == (tail is not None), "a tail has its rows")
        if tail is not None:
            self.check_page(id, tail)
            self.pages[tail] = [*rows, *[None] * (self.rows - len(rows))]

    def load(self, load: Load, count: int, whole: bool) -> list[tuple[Tier, bytes | None]]:
        """The first `count` pages of a load, and with `whole` its state. What could not be read."""
        live = self.scheduler.live.get(load.id)
        require(live is not None and live.attempt == load.attempt, "late writes find what they were promised")
        lost: list[tuple[Tier, bytes | None]] = []
        for source in load.pages[:count]:
            self.check_page(load.id, source.page)
            content = self.content(source.kept, b"page" + source.name)
            if content is None:
                lost.append((source.tier, source.name))
            else:
                self.pages[source.page] = list(content)
        state = self.content(load.kept, b"state" + load.key)
        if state is None:
            lost.append((load.tier, None))
        elif whole and not lost:
            self.bring(load.id, load.slot, load.boundary, load.tail, state)
        return lost

    def content(self, kept: Any, name: bytes = b"") -> Any:
        """What lies under a payload of the store, or in a remote store under a name; None if that is gone."""
        if kept is None:
            return self.remote.get(name)
        return kept.content if isinstance(kept, HostBytes) else self.pages[kept.pages[0]][2:]

    def chunk(self, chunk: Chunk, failing: bool, sampled: dict[int, Sampled]) -> None:
        state, waiting = self.state(chunk.id, chunk.slot), list(chunk.snapshots)
        if waiting and waiting[0].boundary == chunk.start:
            self.snapshot(waiting.pop(0), failing)
        for at, token in enumerate(chunk.tokens.tolist(), start=chunk.start):
            state, row = advance(state, token)
            self.write_row(chunk.id, chunk.table, at, b"wrong" if failing else row)
            self.slots[chunk.slot] = b"wrong" if failing else state
            if waiting and waiting[0].boundary == at + 1:
                self.snapshot(waiting.pop(0), failing)
        require(not waiting, "the boundaries of a chunk lie in it")
        if chunk.samples and not failing:
            sampled[chunk.id] = sample(state, self.read_rows(chunk.table, chunk.start + len(chunk.tokens)))

    def row(self, row: Row, failing: bool, sampled: dict[int, Sampled]) -> None:
        """All drafts are written; the state is that behind those that count. A draft is none if generation ends."""
        states = [self.state(row.id, row.slot)]
        for at, token in enumerate((row.token, *row.drafts), start=row.position):
            state, latent = advance(states[-1], token)
            states.append(state)
            self.write_row(row.id, row.table, at, b"wrong" if failing else latent)
        self.slots[row.slot] = b"wrong"
        for accepted, state in enumerate(states[1:] if not failing else ()):
            self.slots[row.slot] = state
            now = sample(state, self.read_rows(row.table, row.position + accepted + 1))
            sampled[row.id] = now._replace(accepted=accepted)
            if now.last or row.drafts[accepted : accepted + 1] != (now.token,):
                break
