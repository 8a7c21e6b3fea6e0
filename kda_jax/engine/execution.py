"""A step's work on the device: the scheduler's words as calls of the programs, and one wait for the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kda_jax.engine.calls import Chosen, Cut, Lane, Verified
from kda_jax.engine.loading import Read
from kda_jax.engine.memory import Memory
from kda_jax.engine.pages import PoolPages
from kda_jax.engine.programs import Programs
from kda_jax.engine.stream import Token
from kda_jax.engine.work import Chunk, Load, Restore, Results, Row, Sampled, Snapshot, Work, Zero
from kda_jax.sampling import Sampler


class Choice(NamedTuple):
    """How a request's tokens are chosen, and when it has enough.

    Attributes:
        sampler, seed: as in `kda_jax.sampling`.
        stop_tokens: tokens that end it.
        logprobs: how many of the likeliest tokens are told with each; 0 for none, and no logarithm either.
    """

    sampler: Sampler
    seed: int
    stop_tokens: frozenset[int]
    logprobs: int


class MemoryLost(Exception):
    """A program failed after it had taken the memory: what was in it is gone."""


class Execution:
    """The memory, and what work does to it. One thread calls.

    Attributes:
        memory: on the device.
        tokens: what the last step chose, by request and in order.
        errors: why parts of the last step failed, by request.
    """

    def __init__(self, programs: Programs, choices: Mapping[int, Choice]) -> None:
        """
        Args:
            programs: compiled.
            choices: by request; whoever adds work for a request adds its choice first.
        """
        self.programs, self.memory, self._choices = programs, programs.empty(), choices
        self.tokens: dict[int, list[Token]] = {}
        self.errors: dict[int, str] = {}

    def run(self, work: Work) -> Results:
        """Executes a step, except for its loads.

        Raises:
            MemoryLost: if the memory went with a failure. All parts of the step have failed, and `reset` makes another.
        """
        self.tokens, self.errors = {}, {}
        chosen: list[tuple[list[int], Chosen | Verified]] = []
        for snapshot in work.snapshots:
            self._call([snapshot.id], self._snapshot, snapshot)
        for zero in work.zeros:
            self._call([zero.id], self._zero, zero)
        for restore in work.restores:
            self._call([restore.id], self._restore, restore)
        for chunk in work.chunks:
            if chunk.id not in self.errors:
                self._call([chunk.id], self._chunk, chunk, chosen)
        if work.rows:
            self._call([row.id for row in work.rows], self._rows, work.rows, chosen)
        sampled = self._read(chosen)
        return Results(sampled, frozenset(self.errors))

    def write(self, load: Load, read: Read) -> None:
        """Writes what a load brought: pages of latents, and the state into its slot.

        Raises:
            MemoryLost: if the memory went with a failure.
            Exception: if not, and something failed.
        """
        programs, layout = self.programs, self.programs.layout
        try:
            for at, piece in enumerate(read.pieces):  # after each the memory is another one
                part = read.numbers[at * programs.moved_pages : (at + 1) * programs.moved_pages]
                self.memory = programs.write_pages(self.memory, part, [piece])
            if read.state is not None:
                self.memory = programs.write_state(
                    self.memory, load.slot, read.state.recurrent, read.state.conv
                )
            elif isinstance(load.kept, PoolPages):
                pages = load.kept.pages[: layout.snapshot_pages(load.boundary)]
                self.memory = programs.restore(self.memory, load.slot, load.boundary, pages, load.tail)
        except Exception as error:
            if self._lost:
                raise MemoryLost(f"{type(error).__name__}: {error}") from error
            raise

    def reset(self) -> None:
        """A new memory in place of one that was lost, and where that was: there may be no room for two."""
        for leaf in jax.tree.leaves(self.memory):
            leaf.delete()
        self.memory = self.programs.empty()

    def _call(self, ids: Sequence[int], run: Callable[..., Memory], *part: Any) -> None:
        """Runs a part of a step; if it fails, those whose part it was fail with it, and the others go on."""
        try:
            self.memory = run(*part)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if self._lost:
                raise MemoryLost(message) from error
            self.errors.update(dict.fromkeys(ids, message))

    @property
    def _lost(self) -> bool:
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.memory))

    def _zero(self, zero: Zero) -> Memory:
        return self.programs.zero(self.memory, zero.slot)

    def _snapshot(self, snapshot: Snapshot) -> Memory:
        lane = Lane(snapshot.slot, snapshot.table, snapshot.boundary)
        return self.programs.snapshot(self.memory, lane, self._pages(snapshot))

    def _restore(self, restore: Restore) -> Memory:
        pages = restore.pages[: self.programs.layout.snapshot_pages(restore.boundary)]
        return self.programs.restore(self.memory, restore.slot, restore.boundary, pages, restore.tail)

    def _chunk(self, chunk: Chunk, chosen: list[tuple[list[int], Chosen | Verified]]) -> Memory:
        for snapshot in chunk.snapshots:
            if snapshot.boundary == chunk.start:
                self.memory = self._snapshot(snapshot)
        cuts = [
            Cut(snapshot.boundary, self._pages(snapshot))
            for snapshot in chunk.snapshots
            if snapshot.boundary > chunk.start
        ]
        choice = self._choices[chunk.id]
        lane = Lane(chunk.slot, chunk.table, chunk.start, choice.sampler, choice.seed)
        memory, made = self.programs.prefill(self.memory, chunk.tokens.tolist(), lane, cuts)
        if chunk.samples:
            chosen.append(([chunk.id], made))
        return memory

    def _rows(self, rows: tuple[Row, ...], chosen: list[tuple[list[int], Chosen | Verified]]) -> Memory:
        """The decode batch: a token of each request that generates, and with drafts as many as are right."""
        choices = [self._choices[row.id] for row in rows]
        lanes = [
            Lane(row.slot, row.table, row.position, choice.sampler, choice.seed)
            for row, choice in zip(rows, choices)
        ]
        if any(row.drafts for row in rows):
            drafted = [(row.token, *row.drafts) for row in rows]
            memory, made = self.programs.verify(self.memory, drafted, lanes)
        else:
            memory, made = self.programs.decode(self.memory, [row.token for row in rows], lanes)
        chosen.append(([row.id for row in rows], made))
        return memory

    def _pages(self, snapshot: Snapshot) -> tuple[int, ...]:
        """Those that the snapshot fills: one at whole pages has no rows behind them."""
        return snapshot.pages[: self.programs.layout.snapshot_pages(snapshot.boundary)]

    def _read(self, chosen: list[tuple[list[int], Chosen | Verified]]) -> dict[int, Sampled]:
        """Waits for what was chosen: the one place in a step that does."""
        wanted = [
            made if any(self._choices[id].logprobs for id in ids) else made._replace(logits=None)
            for ids, made in chosen
        ]
        try:
            read = jax.device_get(wanted)
        except Exception as error:
            raise MemoryLost(f"{type(error).__name__}: {error}") from error
        sampled = {}
        for (ids, _), made in zip(chosen, read):
            for at, (id, numbers) in enumerate(zip(ids, _numbers(made))):
                choice = self._choices[id]
                self.tokens[id] = [Token(number) for number in numbers]
                if choice.logprobs:
                    logits = np.reshape(made.logits[at], (-1, made.logits.shape[-1]))
                    self.tokens[id] = [
                        _with_logprobs(*each, choice.logprobs) for each in zip(numbers, logits)
                    ]
                sampled[id] = Sampled(numbers[-1], numbers[-1] in choice.stop_tokens, len(numbers) - 1)
        return sampled


def _numbers(made: Chosen | Verified) -> list[list[int]]:
    """The new tokens of each row: the drafts that count, and one more."""
    rows = made.tokens.tolist()
    if isinstance(made, Verified):
        return [row[: count + 1] for row, count in zip(rows, made.accepted.tolist())]
    return [[token] for token in rows]


def _with_logprobs(token: int, logits: np.ndarray, count: int) -> Token:
    """A token with its logarithm of probability and the likeliest tokens', from float32 [vocab]."""
    shifted = logits.astype(np.float64) - logits.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top = np.argsort(-logprobs, kind="stable")[:count]
    return Token(token, float(logprobs[token]), tuple((int(each), float(logprobs[each])) for each in top))
