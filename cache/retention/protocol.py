"""What a store tells a retention policy, and what it asks.

The store owns bytes, pins, the tree of tokens and the tiers. A policy owns worth: it sees every boundary that was ever
made, whether its bytes are still held or not, and each request that passes one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable


class Kind(StrEnum):
    """Why a boundary was made."""

    PROMPT_END = "prompt_end"
    GENERATION_END = "generation_end"
    BRANCH = "branch"
    MISSING = "missing"
    """Latents or the memory of a boundary reach here, a checkpoint does not."""
    INTERVAL = "interval"
    MARK = "mark"
    """The caller's own: the end of a system prompt, of tools, of a turn."""
    BEFORE_END = "before_end"
    """A little before a prompt's end, where later prompts are expected to part from it."""


class Boundary(NamedTuple):
    """A boundary as a policy sees it.

    Attributes:
        key: names the namespace and the tokens before the boundary.
        tokens: how many those are.
        parent: key of the deepest remembered boundary before it on its path, or None.
        children: keys of the remembered boundaries whose parent was `parent` and now is this one.
        kind: why it was made.
        turn: prompts that this path had seen before this one; 0 for a conversation's first.
        state_nbytes: bytes of its recurrent state, which no other boundary shares.
        row_nbytes: bytes of the latent of one token, shared by all boundaries behind that token.
    """

    key: bytes
    tokens: int
    parent: bytes | None
    children: tuple[bytes, ...]
    kind: Kind
    turn: int
    state_nbytes: int
    row_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation:
    """Where a prefill makes checkpoints under this policy.

    Attributes:
        kinds: the kinds that are made.
        interval: tokens between boundaries of `Kind.INTERVAL`; 0 makes none.
        before_end: how many tokens before a prompt's end there is a boundary of `Kind.BEFORE_END`, for each.
    """

    kinds: frozenset[Kind] = frozenset(Kind)
    interval: int = 0
    before_end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ValueError(f"{self.interval=} must not be negative; 0 makes no boundaries at intervals")
        if any(tokens < 1 for tokens in self.before_end):
            raise ValueError(f"{self.before_end=} are distances before a prompt's end, each positive")


@runtime_checkable
class Policy(Protocol):
    """An immutable value; what is told gives a new one. Times are seconds of any clock that never goes back.

    A store has one policy a tier. All of them hear `made`, `used` and `forgotten`; `held` and `dropped` concern one
    tier. For a key: `made` once, then any alternation of `held` and `dropped` starting with `held`, then `forgotten`
    while it is not held. After `forgotten` it may be `made` again.
    """

    @property
    def creation(self) -> Creation:
        """Where prefills make checkpoints."""
        ...

    def made(self, boundary: Boundary, now: float) -> Self:
        """A boundary is remembered from now on. It is not held yet."""
        ...

    def held(self, key: bytes, now: float) -> Self:
        """The bytes of a remembered boundary are in this tier from now on."""
        ...

    def used(self, path: Sequence[bytes], hit: bytes | None, now: float) -> Self:
        """A prompt came: `path` are the remembered boundaries it passes, shallow to deep, held or not; it resumes from
        `hit`, one of them, or from none."""
        ...

    def dropped(self, key: bytes, now: float) -> Self:
        """The bytes of a boundary are no longer in this tier. It stays remembered."""
        ...

    def forgotten(self, key: bytes) -> Self:
        """A boundary that is not held is no longer remembered; its children become its parent's."""
        ...

    def victims(self, nbytes: int, now: float) -> Iterator[bytes]:
        """Held keys, least worth first, until the iterator ends or the store has freed `nbytes` and stops asking. The
        store skips those that are pinned."""
        ...

    def worth(self, key: bytes, now: float) -> float:
        """What keeping a held key is worth: recomputed tokens it is expected to save, a second and a byte freed by
        dropping it (or whatever a simpler policy ranks by). Larger is kept longer."""
        ...


@runtime_checkable
class Lasting(Protocol):
    """What a policy has, too, if it knows more than boundaries and an order: that survives a restart."""

    def saved(self) -> dict[str, Any]:
        """All that it knows, in numbers, strings, lists and dicts."""
        ...

    def restored(
        self, saved: dict[str, Any], boundaries: Sequence[Boundary], held: Sequence[bytes], later: float
    ) -> Self:
        """This empty policy with what `saved` gave.

        Args:
            saved: what was saved.
            boundaries: those that are remembered again, parents before their children.
            held: the keys of those whose bytes are there.
            later: seconds to add to saved times.
        """
        ...
