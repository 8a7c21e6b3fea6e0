"""What a scheduler asks for in a step, and what it is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cache.payload import Payload
from cache.retention.protocol import Kind
from cache.tier import Tier
from cache.tokens import Tokens
from kda_jax.engine.request import Outcome


class Source(NamedTuple):
    """One page of latents to read.

    Attributes:
        page: of the pool, that it goes to.
        tier: that it comes from.
        name: its name there.
        kept: what the store has for it; None for a remote store.
    """

    page: int
    tier: Tier
    name: bytes
    kept: Payload | None


class Load(NamedTuple):
    """Read a checkpoint, all of it or nothing, beside other work; then call `Scheduler.loaded`.

    Attributes:
        id: of the request.
        attempt: of the request, to tell `loaded`.
        slot: that the state goes to.
        boundary: tokens before it.
        key: its name.
        tier: that the state comes from.
        kept: what the store has for the state, `PoolPages` if that lies in the pool; None for a remote store.
        tail: page for the rows behind the last whole page; None if there are none.
        pages: whole pages to read.
    """

    id: int
    attempt: int
    slot: int
    boundary: int
    key: bytes
    tier: Tier
    kept: Payload | None
    tail: int | None
    pages: tuple[Source, ...]


class Zero(NamedTuple):
    """Clear a slot for a sequence before its first token."""

    id: int
    slot: int


class Restore(NamedTuple):
    """Copy a state from `pages` of the pool into a slot, and the rows of its unfinished page to `tail`."""

    id: int
    slot: int
    boundary: int
    pages: tuple[int, ...]
    tail: int | None


class Snapshot(NamedTuple):
    """Copy the state behind `boundary` tokens from a slot to `pages`, with the rows of its unfinished page."""

    id: int
    slot: int
    boundary: int
    kind: Kind
    pages: tuple[int, ...]
    table: tuple[int, ...]


class Chunk(NamedTuple):
    """Compute tokens `[start, stop)` of a prompt.

    Attributes:
        id: of the request.
        slot: of its state.
        start: tokens that the state has taken in.
        tokens: the new ones.
        table: pages of its latents.
        snapshots: states to copy on the way, shallow to deep; one at `start`, before anything is computed.
        samples: whether it reaches the prompt's end, so that a token is sampled.
    """

    id: int
    slot: int
    start: int
    tokens: Tokens
    table: tuple[int, ...]
    snapshots: tuple[Snapshot, ...]
    samples: bool


class Row(NamedTuple):
    """Compute one token at `position`, and those of its drafts that the model would sample; and sample the next.

    Attributes:
        id: of the request.
        slot: of its state.
        position: tokens that the state has taken in.
        token: the new one.
        table: pages of its latents, with room for all drafts.
        drafts: guesses of what comes behind it.
    """

    id: int
    slot: int
    position: int
    token: int
    table: tuple[int, ...]
    drafts: tuple[int, ...] = ()


class Work(NamedTuple):
    """One step, to be executed in the order of its fields; loads run beside it.

    Attributes:
        snapshots: of requests that finished or are preempted.
        zeros: slots to clear.
        restores: states to bring back.
        chunks: of prefills.
        rows: of the decode batch.
        loads: to begin.
    """

    snapshots: tuple[Snapshot, ...] = ()
    zeros: tuple[Zero, ...] = ()
    restores: tuple[Restore, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    rows: tuple[Row, ...] = ()
    loads: tuple[Load, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not any(self)


class Sampled(NamedTuple):
    """What was sampled.

    Attributes:
        token: behind the drafts that count.
        last: whether generation stops with it.
        accepted: how many of the row's drafts count; the state has taken in these and no more.
    """

    token: int
    last: bool = False
    accepted: int = 0


class Results(NamedTuple):
    """What became of a step.

    Attributes:
        sampled: by request, of every chunk that samples and of every row.
        failed: requests whose part could not be computed.
    """

    sampled: Mapping[int, Sampled]
    failed: frozenset[int] = frozenset()


class Ended(NamedTuple):
    """A request ended."""

    id: int
    outcome: Outcome


class Report(NamedTuple):
    """What there is to tell since the last report.

    Attributes:
        tokens: sampled, by request and in order.
        ended: requests, each once.
        published: keys of boundaries that the device tier holds since now.
    """

    tokens: tuple[tuple[int, int], ...] = ()
    ended: tuple[Ended, ...] = ()
    published: tuple[bytes, ...] = ()
