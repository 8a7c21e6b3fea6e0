"""The engine's compiled programs: few, of fixed shapes, each writing the memory it is given in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax.engine import snapshot, steps
from kda_jax.engine.calls import Chosen, Cut, Lane, Verified
from kda_jax.engine.memory import Layout, Memory, empty_memory
from kda_jax.forward import SplitModel, bucket, config_of, dtype_of, split
from kda_jax.model import Model
from kda_jax.sampling import RowSamplers, row_samplers

_MOVES = "read_pages", "write_pages", "write_state"
Progress = Callable[[str, int, int], None]
"""Called before a program is compiled: its name, how many are done, and how many there are."""


class Programs:
    """Every call takes the memory and returns it; the one that was given is used up.

    Args:
        model: the model, or what `split` made of it.
        layout: the memory's sizes.
        most_tokens: of a chunk of prefill; chunks are padded to 64, 128, 256 ... up to it.
        most_cuts: snapshots in one chunk.
        moved_pages: pages that one call of `read_pages` or `write_pages` moves; more take several.
        most_drafts: behind a row's token; rows with drafts are padded to 3, 7, 15 ... up to it. 0 for none.

    Raises:
        ValueError: sizes that are not positive, a layout of another model, or a bfloat16 pool on a CPU.
    """

    def __init__(
        self,
        model: Model | SplitModel,
        layout: Layout,
        *,
        most_tokens: int = 512,
        most_cuts: int = 4,
        moved_pages: int = 8,
        most_drafts: int = 0,
    ) -> None:
        if min(most_tokens, most_cuts, moved_pages, most_drafts + 1) < 1:
            raise ValueError(
                f"{most_tokens=}, {most_cuts=} and {moved_pages=} must be positive, {most_drafts=} not negative"
            )
        self.graphdef, self.params = model if isinstance(model, tuple) else split(model)
        if config_of((self.graphdef, self.params)) != layout.config:
            raise ValueError("the layout is of another model: make it from this model's config")
        if dtype_of(self.params) != layout.window_dtype:
            raise ValueError(f"the model is of {dtype_of(self.params)}, the layout of {layout.window_dtype}")
        self._weights, self._tree = jax.tree.flatten(self.params)  # once, and not at every call
        if jax.default_backend() == "cpu" and layout.dtype == jnp.bfloat16:
            raise ValueError("a CPU does not keep the bits of a bfloat16 pool: give the layout dtype float32")
        self.layout, self.most_cuts, self.moved_pages = layout, most_cuts, moved_pages
        self.batches = _doubling(1, layout.num_slots - 1)
        self.chunks = _doubling(64, bucket(most_tokens))
        self.widths = _doubling(min(4, most_drafts + 1), most_drafts + 1) if most_drafts else ()
        self._compiled: dict[tuple[str, int, int], jax.stages.Compiled] = {}

    def empty(self) -> Memory:
        """A memory of zeros."""
        return empty_memory(self.layout)

    def compile_all(self, progress: Progress | None = None) -> None:
        """Compiles every program there is; what is left out is compiled when it is first called."""
        names = [("decode", size, 0) for size in self.batches]
        names += [("verify", size, width) for size in self.batches for width in self.widths]
        names += [("prefill", size, cuts) for size in self.chunks for cuts in (0, self.most_cuts)]
        names += [(name, 0, 0) for name in ("snapshot", "restore", "zero", *_MOVES)]
        for done, name in enumerate(names):
            if progress is not None:
                progress(" ".join(str(part) for part in name if part), done, len(names))
            self.compiled(*name)

    def decode(self, memory: Memory, tokens: Sequence[int], rows: Sequence[Lane]) -> tuple[Memory, Chosen]:
        """Absorbs one token a row.

        Raises:
            ValueError: no rows or more than there are slots, a slot twice, or rows without a place for their token.
        """
        size, where = self._batch("decode", rows, [1] * len(rows))
        memory, chosen, logits = self._run(("decode", size, 0), memory, _padded(tokens, size), *where)
        return memory, Chosen(chosen, logits)

    def verify(
        self, memory: Memory, tokens: Sequence[Sequence[int]], rows: Sequence[Lane]
    ) -> tuple[Memory, Verified]:
        """Absorbs one token a row and those of its drafts that the model would choose itself.

        The tokens are those that `decode` would choose one by one: greedy rows take the same largest logit, rows with a
        temperature the same random numbers, which depend on seed and place alone. Logits differ from those of
        `decode` by rounding, as they do between batches of other sizes; two that lie so close may change places.

        Args:
            memory: given up.
            tokens: of each row one and its drafts, none to `most_drafts`.
            rows: as in `decode`, with room for the drafts. Rows of latents behind the tokens that count are dead.

        Raises:
            ValueError: as `decode`, a row without a token, or more drafts than there may be.
        """
        counts = [len(row) for row in tokens]
        if not self.widths or min(counts, default=0) < 1 or max(counts) > self.widths[-1]:
            raise ValueError(
                f"verify takes a token and up to {max(self.widths, default=1) - 1} drafts a row, "
                f"got {counts} tokens: give fewer, or more as most_drafts"
            )
        size, where = self._batch("verify", rows, counts)
        width = next(width for width in self.widths if width >= max(counts))
        padded = np.zeros((size, width), np.int32)
        for i, row in enumerate(tokens):
            padded[i, : len(row)] = row
        memory, *verified = self._run(("verify", size, width), memory, padded, _padded(counts, size), *where)
        return memory, Verified(*verified)

    def prefill(
        self, memory: Memory, tokens: Sequence[int], row: Lane, cuts: Sequence[Cut] = ()
    ) -> tuple[Memory, Chosen]:
        """Absorbs a chunk of one sequence and saves its state at `cuts`; the token chosen is the one behind the chunk.

        Raises:
            ValueError: no tokens or more than a chunk has, no room for them, or cuts outside the chunk or too many.
        """
        count = len(tokens)
        if not 0 < count <= self.chunks[-1] or len(cuts) > self.most_cuts:
            raise ValueError(
                f"a chunk has 1..{self.chunks[-1]} tokens and at most {self.most_cuts} cuts, "
                f"got {count} and {len(cuts)}"
            )
        relative = [cut.position - row.position for cut in cuts]
        if relative and not 0 < min(relative) <= max(relative) <= count:
            raise ValueError(
                f"cuts must lie in {row.position + 1}..{row.position + count}, got {[cut.position for cut in cuts]}"
            )
        size, num_cuts = next(size for size in self.chunks if size >= count), self.most_cuts if cuts else 0
        pages = np.zeros((num_cuts, self.layout.state_pages + 1), np.int32)
        for i, cut in enumerate(cuts):
            pages[i] = self._snapshot_pages(cut.pages, cut.position)
        memory, chosen, logits = self._run(
            ("prefill", size, num_cuts),
            memory,
            _padded(tokens, size),
            np.int32(count),
            np.int32(row.slot),
            self._table(row, count),
            np.int32(row.position),
            np.asarray([*relative, *relative[-1:] * (num_cuts - len(cuts))], np.int32),
            pages,
            row_samplers([row.sampler], [row.seed]),
        )
        return memory, Chosen(chosen, logits)

    def snapshot(self, memory: Memory, row: Lane, pages: Sequence[int]) -> Memory:
        """Saves a sequence's state in pages, `Layout.snapshot_pages(row.position)` of them.

        Raises:
            ValueError: another number of pages.
        """
        to, position = self._snapshot_pages(pages, row.position), np.int32(row.position)
        return self._run(("snapshot", 0, 0), memory, np.int32(row.slot), self._table(row, 0), position, to)

    def restore(
        self, memory: Memory, slot: int, position: int, pages: Sequence[int], last: int | None = None
    ) -> Memory:
        """Writes a snapshot at `position` into a sequence's slot, and its rows of latents, if any, into a page.

        Args:
            memory: the pools.
            slot: the sequence's.
            position: tokens before the snapshot.
            pages: the snapshot's. Whole pages of latents before it are the caller's to name.
            last: the sequence's page that `position` lies in; None where a page begins there.

        Raises:
            ValueError: another number of pages than the snapshot has, or no page for its rows.
        """
        saved, inside = self._snapshot_pages(pages, position), position % self.layout.page_rows
        if inside and not last:
            raise ValueError(
                f"a snapshot at {position} has {inside} rows of an unfinished page: give one for them"
            )
        page = last if inside and last else 0
        return self._run(("restore", 0, 0), memory, np.int32(slot), saved, np.int32(page))

    def zero(self, memory: Memory, slot: int) -> Memory:
        """Makes a slot that of a sequence before its first token."""
        return self._run(("zero", 0, 0), memory, np.int32(slot))

    def write_state(
        self, memory: Memory, slot: int, recurrent: Sequence[np.ndarray], conv: Sequence[np.ndarray]
    ) -> Memory:
        """Writes the states of one sequence, [1, ...] a KDA layer as in `KDAState`, into a slot."""
        return self._run(("write_state", 0, 0), memory, np.int32(slot), tuple(recurrent), tuple(conv))

    def read_pages(self, memory: Memory, pages: Sequence[int]) -> list[jax.Array]:
        """Copies of pages, in pieces of `moved_pages`: [moved_pages, planes, R, L]; the memory stays good. The last
        piece is filled up with page 0."""
        starts = range(0, len(pages), self.moved_pages)
        name, size = ("read_pages", 0, 0), self.moved_pages
        return [self._run(name, memory, _padded(pages[at : at + size], size)) for at in starts]

    def write_pages(
        self, memory: Memory, pages: Sequence[int], data: Sequence[np.ndarray | jax.Array]
    ) -> Memory:
        """Writes what `read_pages` gave, in the same pieces, into pages."""
        size = self.moved_pages
        if len(data) != -(-len(pages) // size):
            raise ValueError(f"{len(pages)} pages come in pieces of {size}, got {len(data)} pieces")
        for i, piece in enumerate(data):
            part = _padded(pages[i * size : (i + 1) * size], size)
            memory = self._run(("write_pages", 0, 0), memory, part, piece)
        return memory

    def compiled(self, kind: str, size: int = 0, more: int = 0) -> jax.stages.Compiled:
        """One program, compiled when it is first asked for; `size` is its rows or, of a prefill, its tokens, `more` the
        tokens of each row or the prefill's cuts."""
        name = kind, size, more
        if name not in self._compiled:
            run, shapes = self._parts(kind, size, more)
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
            given_up = () if kind == "read_pages" else ("memory",)
            self._compiled[name] = jax.jit(run, donate_argnames=given_up).lower(*shapes).compile()
        return self._compiled[name]

    def _parts(self, kind: str, size: int, more: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A program's function and examples of its arguments."""
        memory = jax.eval_shape(self.empty)
        one, table = np.int32(0), np.zeros((self.layout.table_width,), np.int32)
        pages = np.zeros((self.layout.state_pages + 1,), np.int32)
        if kind in ("decode", "verify"):
            rows, samplers = np.zeros((size,), np.int32), row_samplers([], [], size)
            where = rows, np.zeros((size, *table.shape), np.int32), rows, samplers
            if kind == "decode":
                return self._with_model(steps.decode), (self._weights, memory, rows, *where)
            tokens = np.zeros((size, more), np.int32)
            return self._with_model(steps.verify), (self._weights, memory, tokens, rows, *where)
        if kind == "prefill":
            tokens, at = np.zeros((size,), np.int32), np.zeros((more,), np.int32)
            many = np.zeros((more, *pages.shape), np.int32)
            samplers = row_samplers([], [], 1)
            arguments = memory, tokens, one, one, table, one, at, many, samplers
            return self._with_model(steps.prefill), (self._weights, *arguments)
        moved = np.zeros((self.moved_pages,), np.int32)
        one_slot = jax.tree.map(
            lambda pool: jax.ShapeDtypeStruct((1, *pool.shape[1:]), pool.dtype),
            (memory.recurrent, memory.conv),
        )
        data = jax.ShapeDtypeStruct((len(moved), *snapshot.page_shape(memory)), self.layout.dtype)
        return {
            "snapshot": (steps.snapshot, (memory, one, table, one, pages)),
            "restore": (snapshot.load, (memory, one, pages, one)),
            "zero": (steps.zero, (memory, one)),
            "read_pages": (snapshot.get_pages, (memory, moved)),
            "write_pages": (snapshot.put_pages, (memory, moved, data)),
            "write_state": (snapshot.put_slot, (memory, one, *one_slot)),
        }[kind]

    def _with_model(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step that takes the weights as a list."""

        def run(weights: list[jax.Array], memory: Memory, *args: Any) -> Any:
            return step(self.graphdef, jax.tree.unflatten(self._tree, weights), memory, *args)

        return run

    def _run(self, name: tuple[str, int, int], *args: Any) -> Any:
        with_model = (self._weights,) if name[0] in ("decode", "verify", "prefill") else ()
        return self.compiled(*name)(*with_model, *args)

    def _batch(
        self, kind: str, rows: Sequence[Lane], counts: Sequence[int]
    ) -> tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray, RowSamplers]]:
        """How many rows a batch is padded to, and their slots, tables, positions and samplers; each has room for its
        count of tokens."""
        slots = [row.slot for row in rows]
        if not 0 < len(rows) == len(counts) < self.layout.num_slots or len(set(slots)) < len(slots):
            raise ValueError(
                f"{kind} takes 1..{self.layout.num_slots - 1} rows, each in a slot of its own: {slots}"
            )
        size = next(size for size in self.batches if size >= len(rows))
        table = np.zeros((size, self.layout.table_width), np.int32)
        for i, (row, count) in enumerate(zip(rows, counts)):
            table[i] = self._table(row, count)
        samplers = row_samplers([row.sampler for row in rows], [row.seed for row in rows], size)
        return size, (_padded(slots, size), table, _padded([row.position for row in rows], size), samplers)

    def _table(self, row: Lane, more: int) -> np.ndarray:
        """The row's pages as int32 [n], after a look whether they have room for `more` tokens."""
        room = len(row.pages) * self.layout.page_rows
        if not 0 < row.slot < self.layout.num_slots or 0 in row.pages or room < row.position + more:
            raise ValueError(
                f"a sequence needs a slot in 1..{self.layout.num_slots - 1} and pages from 1 on with room for "
                f"{row.position + more} tokens, got slot {row.slot} and {len(row.pages)} pages with room for {room}"
            )
        if len(row.pages) > self.layout.table_width:
            raise ValueError(
                f"a sequence has at most {self.layout.table_width} pages, got {len(row.pages)}: "
                f"the memory was laid out for {self.layout.max_tokens} tokens"
            )
        return _padded(row.pages, self.layout.table_width)

    def _snapshot_pages(self, pages: Sequence[int], position: int) -> np.ndarray:
        """A snapshot's pages as int32 [k + 1]."""
        if len(pages) != self.layout.snapshot_pages(position) or 0 in pages:
            raise ValueError(
                f"a snapshot at {position} has {self.layout.snapshot_pages(position)} pages, none of them page 0; "
                f"got {list(pages)}"
            )
        return _padded(pages, self.layout.state_pages + 1)


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first ... and last."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return tuple(sizes)


def _padded(numbers: Sequence[int], size: int) -> np.ndarray:
    """int32 [size], zeros behind the numbers."""
    return np.asarray([*numbers, *[0] * (size - len(numbers))], np.int32)
