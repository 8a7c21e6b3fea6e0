"""The engine's programs: tokens of requests side by side, snapshots, and nothing that leaks or is copied.

The memory is NaN wherever nobody has written, so that a row read by mistake is seen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.engine.memory import Layout, Memory, empty_memory
from kda_jax.engine.programs import Cut, Lane, Programs
from kda_jax.engine.snapshot import load, save
from kda_jax.forward import decode, prefill
from kda_jax.sampling import Sampler, make_sampler, sample
from measure import assert_close
from random_model import random_model, small_config

ROUNDING = 2e-5
MEMORY = Memory((), (), ())  # of calls that are refused before they touch it
PAGE, NEW = 16, 12
CONFIG = small_config(model_max_length=512)
# planes of 16 MB: a copy of a plane in any program would stand out
LAYOUT = Layout(
    config=CONFIG,
    dtype=jnp.dtype(jnp.float32),
    window_dtype=jnp.dtype(jnp.float32),
    num_slots=9,
    num_pages=16384,
    page_rows=PAGE,
    max_tokens=512,
)


PROGRAMS = [
    *["decode 1", "decode 2", "decode 4", "decode 8", "prefill 64", "prefill 64 2"],
    *["snapshot", "restore", "zero", "read_pages", "write_pages", "write_state"],
]


@pytest.fixture(scope="module")
def programs() -> Programs:
    return Programs(random_model(CONFIG), LAYOUT, most_tokens=64, most_cuts=2, moved_pages=4)


def nan_memory(layout: Layout = LAYOUT) -> Memory:
    """Memory in which nothing may be read that was not written."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.full(leaf.shape, np.nan, leaf.dtype)),
        jax.eval_shape(lambda: empty_memory(layout)),
    )


class Request:
    """A prompt on its way through slots and pages."""

    def __init__(self, length: int, slot: int, sampler: Sampler, seed: int) -> None:
        self.prompt = np.random.default_rng(length).integers(0, CONFIG.vocab_size, length).tolist()
        self.made: list[int] = []
        self.logits: list[np.ndarray] = []
        self.row = Lane(slot, [], 0, sampler, seed)

    def prefill(self, programs: Programs, memory: Memory, pages: list[int], cuts: Any = ()) -> Memory:
        """The next chunk, in pages taken from `pages`; the first finds its slot zeroed."""
        at = self.row.position
        if at == 0:
            memory = programs.zero(memory, self.row.slot)
        chunk = self.prompt[at : at + 64]
        self.take(pages, len(chunk))
        memory, chosen = programs.prefill(memory, chunk, self.row, cuts)
        self.row = self.row._replace(position=at + len(chunk))
        if self.row.position == len(self.prompt):
            self.add(int(chosen.tokens[0]), np.asarray(chosen.logits[0]))
        return memory

    def take(self, pages: list[int], more: int) -> None:
        """Pages for `more` tokens."""
        missing = -(-(self.row.position + more) // PAGE) - len(self.row.pages)
        self.row = self.row._replace(pages=[*self.row.pages, *(pages.pop() for _ in range(missing))])

    def add(self, token: int, logits: np.ndarray) -> None:
        self.made.append(token)
        self.logits.append(logits)


def decode_all(programs: Programs, memory: Memory, requests: list[Request], pages: list[int]) -> Memory:
    """One token of each request."""
    for one in requests:
        one.take(pages, 1)
    memory, chosen = programs.decode(
        memory, [one.made[-1] for one in requests], [one.row for one in requests]
    )
    tokens, logits = np.asarray(chosen.tokens), np.asarray(chosen.logits)
    for i, one in enumerate(requests):
        one.row = one.row._replace(position=one.row.position + 1)
        one.add(int(tokens[i]), logits[i])
    return memory


def alone(programs: Programs, request: Request, count: int) -> tuple[list[int], list[np.ndarray]]:
    """The request's tokens and logits from `prefill` and `decode` of one row, with a state in one piece."""
    parts = (programs.graphdef, programs.params)
    key, tokens, rows = jax.random.key(request.row.seed), [], []
    last, state = prefill(parts, [request.prompt], capacity=512, last_only=True)
    logits = last[:, 0]
    for _ in range(count):
        tokens.append(int(sample(logits, request.row.sampler, key, state.position)[0]))
        rows.append(np.asarray(logits[0]))
        logits, state = decode(parts, tokens[-1:], state)
    return tokens, rows


def scattered(seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).permutation(np.arange(1, LAYOUT.num_pages)).tolist()


def test_requests_side_by_side_make_the_tokens_they_make_alone(programs: Programs) -> None:
    warm = make_sampler(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01)
    greedy = Sampler()
    waiting = [
        Request(length, 0, sampler, seed)
        for length, sampler, seed in [
            (130, greedy, 0), (1, warm, 5), (64, greedy, 0), (63, make_sampler(temperature=1.3), 2**31 + 7),
            (65, greedy, 0), (2, greedy, 0), (128, warm, 5), (70, greedy, 0),
        ]
    ]  # fmt: skip
    memory, pages, slots = nan_memory(), scattered(), [1, 8, 3, 6, 5]
    running: list[Request] = []
    done: list[Request] = []
    widths = set()
    while waiting or running:
        if waiting and slots:
            one = waiting.pop(0)
            one.row = one.row._replace(slot=slots.pop())
            running.append(one)
        for one in running:
            if not one.made:
                memory = one.prefill(programs, memory, pages)
                break
        ready = [one for one in running if one.made]
        if ready:
            widths.add(next(size for size in programs.batches if size >= len(ready)))
            memory = decode_all(programs, memory, ready, pages)
        for one in [one for one in ready if len(one.made) == NEW]:
            running.remove(one)
            done.append(one)
            slots.append(one.row.slot)
            pages += one.row.pages  # the next request gets them as they are
    assert widths == {1, 2, 4, 8}
    assert np.isnan(memory.recurrent[0][0]).all() and np.isnan(memory.conv[0][0]).all(), "slot 0 is nobody's"
    assert len({one.row.slot for one in done}) == 5 < len(done)
    for one in done:
        tokens, logits = alone(programs, one, NEW)
        assert one.made == tokens, f"prompt of {len(one.prompt)}"
        assert_close("logits", np.stack(logits), np.stack(one.logits), ROUNDING)


def slot_of(memory: Memory, slot: int) -> list[np.ndarray]:
    return [np.asarray(pool[slot]) for pool in (*memory.recurrent, *memory.conv)]


def rows_of(memory: Memory, row: Lane) -> list[np.ndarray]:
    """The sequence's live latents."""
    at = np.arange(row.position)
    pages = np.asarray(row.pages, np.int32)
    return [np.asarray(plane)[pages[at // PAGE], at % PAGE] for plane in memory.planes]


def assert_same_bits(want: list[np.ndarray], got: list[np.ndarray]) -> None:
    for a, b in zip(want, got, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


def test_a_row_has_the_bits_that_it_has_beside_others(programs: Programs) -> None:
    """100 steps of five rows, padded to eight, and again in another order, other slots, other pages."""
    made = []
    for turn, slots in enumerate([[1, 2, 3, 4, 5], [8, 3, 1, 5, 2]]):
        memory, pages = nan_memory(), scattered(turn)
        requests = [
            Request(length, slot, Sampler(), 0)
            for length, slot in zip([3, 64, 17, 60, 1], slots, strict=True)
        ]
        for one in requests:
            memory = one.prefill(programs, memory, pages)
        order = requests[::-1] if turn else requests
        for _ in range(100):
            memory = decode_all(programs, memory, order, pages)
        made.append(
            [(one.logits, slot_of(memory, one.row.slot), rows_of(memory, one.row)) for one in requests]
        )
    for want, got in zip(*made, strict=True):
        for a, b in zip(want, got, strict=True):
            assert_same_bits(a, b)


@pytest.mark.optimised
@pytest.mark.slow
def test_a_snapshot_resumes_to_the_bit(programs: Programs) -> None:
    """Cut inside a chunk, off and on the grid; resumed in another slot and other pages, while the first goes on."""
    memory, pages = nan_memory(), scattered(2)
    live = Request(128, 4, Sampler(), 0)
    cuts = [
        Cut(position, [pages.pop() for _ in range(LAYOUT.snapshot_pages(position))])
        for position in (101, 128)
    ]
    memory = live.prefill(programs, memory, pages)
    memory = live.prefill(programs, memory, pages, cuts)
    at_128 = slot_of(memory, 4), rows_of(memory, live.row)
    for _ in range(5):
        memory = decode_all(programs, memory, [live], pages)
    ended = [pages.pop() for _ in range(LAYOUT.snapshot_pages(133))]
    memory = programs.snapshot(memory, live.row, ended)
    at_133 = slot_of(memory, 4), rows_of(memory, live.row)
    for plane in memory.planes:
        assert not np.asarray(plane[ended[-1], 133 % PAGE :]).any(), "dead rows of a snapshot are zero"
    memory = decode_all(programs, memory, [live], pages)

    cold = Request(128, 7, Sampler(), 0)
    cold.prompt = cold.prompt[:101]
    memory = cold.prefill(programs, memory, pages)
    memory = cold.prefill(programs, memory, pages)
    at_101 = slot_of(memory, 7), rows_of(memory, cold.row)

    for position, saved, (states, latents) in [
        (101, cuts[0].pages, at_101),
        (128, cuts[1].pages, at_128),
        (133, ended, at_133),
    ]:
        shared = live.row.pages[: position // PAGE]
        own = [pages.pop()] if position % PAGE else []
        row = Lane(2, [*shared, *own], position)
        memory = programs.restore(memory, 2, position, saved, own[0] if own else None)
        assert_same_bits(states, slot_of(memory, 2))
        assert_same_bits(latents, rows_of(memory, row))
        if own and position > 128:
            memory, chosen = programs.decode(memory, [live.made[-2]], [row])
            np.testing.assert_array_equal(live.logits[-1], chosen.logits[0])
            assert_same_bits(slot_of(memory, 4), slot_of(memory, 2))
    for pool in (*memory.recurrent, *memory.conv):
        assert np.isnan(np.asarray(pool)[[0, 1, 3, 5, 6, 8]]).all(), "slots of nobody"


@pytest.mark.parametrize(
    ("pool", "window"),
    [(jnp.float32, jnp.float32), (jnp.float16, jnp.float16), (jnp.float32, jnp.bfloat16)],
    ids=["float32", "float16", "bfloat16 in float32"],
)
def test_snapshots_keep_every_bit(pool: Any, window: Any) -> None:
    """States of random bits, NaNs with payloads among them: no program of arithmetic may touch them."""
    layout = dataclasses.replace(
        LAYOUT, dtype=jnp.dtype(pool), window_dtype=jnp.dtype(window), page_rows=4, num_pages=200
    )
    memory, rng = nan_memory(layout), np.random.default_rng(0)

    def noise(leaf: Any) -> jax.Array:
        return jnp.asarray(
            rng.integers(0, 256, (*leaf.shape[:-1], leaf.shape[-1] * leaf.dtype.itemsize), np.uint8).view(
                leaf.dtype
            )
        )

    def numbers(leaf: Any) -> jax.Array:
        return jnp.asarray(rng.standard_normal(leaf.shape).astype(leaf.dtype))

    memory = memory._replace(
        recurrent=jax.tree.map(noise, memory.recurrent), conv=jax.tree.map(numbers, memory.conv)
    )
    pages = np.random.default_rng(1).permutation(np.arange(1, 190))[: layout.state_pages + 1].astype(np.int32)
    states = [[pool[3:4] for pool in pools] for pools in (memory.recurrent, memory.conv)]
    table, position = jnp.asarray([199, 198], jnp.int32), jnp.asarray([64], jnp.int32)
    pages[-1] = 0
    saved = jax.jit(save)(memory, *states, table, position, jnp.asarray(pages)[None])
    loaded = jax.jit(load)(saved, jnp.int32(5), jnp.asarray(pages), jnp.int32(0))
    for want, got in zip((*memory.recurrent, *memory.conv), (*loaded.recurrent, *loaded.conv), strict=True):
        assert np.asarray(want[3]).tobytes() == np.asarray(got[5]).tobytes()
        rest = [0, 1, 2, 3, 4, 6, 7, 8]
        assert np.asarray(want)[rest].tobytes() == np.asarray(got)[rest].tobytes()


def test_pages_are_moved_to_the_bit(programs: Programs) -> None:
    memory, rng = nan_memory(), np.random.default_rng(3)
    noise = [rng.standard_normal((4, 1, PAGE, CONFIG.latent_size)).astype(np.float32) for _ in range(2)]
    memory = programs.write_pages(memory, [9, 4, 4095, 7, 30, 31], noise)
    back = [np.asarray(piece) for piece in programs.read_pages(memory, [31, 9, 30, 4, 7, 4095])]
    whole, back = np.concatenate(noise), np.concatenate(back)
    np.testing.assert_array_equal(whole[[5, 0, 4, 1, 3, 2]], back[:6])
    untouched = np.delete(np.asarray(memory.planes[0]), [0, 9, 4, 4095, 7, 30, 31], 0)
    assert np.isnan(untouched).all()


def test_every_program_is_compiled_at_start(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    programs.compile_all(lambda *what: seen.append(what))
    assert seen == [(name, i, len(PROGRAMS)) for i, name in enumerate(PROGRAMS)]
    assert programs.batches == (1, 2, 4, 8) and programs.chunks == (64,)
    monkeypatch.setattr(jax, "jit", None)
    memory, pages, one = nan_memory(), scattered(), Request(9, 3, Sampler(), 0)
    memory = one.prefill(programs, memory, pages)
    decode_all(programs, memory, [one], pages)


@pytest.mark.parametrize("name", PROGRAMS)
def test_pools_are_written_in_place(programs: Programs, name: str) -> None:
    """No program holds as much as a quarter of a plane besides its arguments."""
    kind, *sizes = name.split()
    analysis = programs.compiled(kind, *map(int, sizes)).memory_analysis()
    assert analysis is not None
    plane = LAYOUT.num_pages * LAYOUT.page_nbytes // LAYOUT.num_planes
    assert analysis.temp_size_in_bytes < plane // 4
    assert analysis.alias_size_in_bytes >= (0 if kind == "read_pages" else LAYOUT.nbytes)


def test_memory_is_laid_out_within_its_bytes() -> None:
    layout = Layout.within(CONFIG, jnp.bfloat16, nbytes=10**6, num_slots=9, page_rows=16, max_tokens=100)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(empty_memory(layout)))
    assert size == layout.nbytes <= 10**6 < size + layout.page_nbytes
    assert layout.table_width == 7
    assert (layout.dtype, layout.window_dtype) == (jnp.float32, jnp.bfloat16)
    numbers = 2 * 8 * 8 + 3 * 3 * 2 * 8  # of the one KDA layer: states and windows
    assert (layout.page_size, layout.state_pages) == (16 * 16, -(-numbers // 256))
    assert [layout.snapshot_pages(t) - layout.state_pages for t in (0, 1, 16, 17)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(num_slots=1), "num_slots=1 must be at least 2"),
        (dict(dtype=jnp.dtype(jnp.float16)), "a pool of float16 cannot hold windows of float32"),
        (dict(num_pages=10), "a sequence of 512 tokens and a snapshot of its state need"),
        (dict(config=dataclasses.replace(CONFIG, layers=("kda", "kda"))), "no layer of latent attention"),
    ],
    ids=["slots", "pool", "pages", "model"],
)
def test_refuses_a_memory_that_serves_nobody(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(LAYOUT, **changes)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda p: p.decode(MEMORY, [1, 1], [Lane(1, [5], 3), Lane(1, [6], 3)]), "each in a slot of its own"),
        (lambda p: p.decode(MEMORY, [1], [Lane(1, [5], 16)]), "room for 17 tokens, got slot 1 and 1 pages"),
        (lambda p: p.decode(MEMORY, [1], [Lane(0, [5], 3)]), "a slot in 1..8"),
        (lambda p: p.decode(MEMORY, [1], [Lane(1, [0], 3)]), "pages from 1 on"),
        (lambda p: p.prefill(MEMORY, [1] * 65, Lane(1, [5, 6], 0)), "a chunk has 1..64 tokens"),
        (
            lambda p: p.prefill(MEMORY, [1] * 9, Lane(1, [5], 7), [Cut(7, [6])]),
            r"cuts must lie in 8..16, got \[7\]",
        ),
        (lambda p: p.snapshot(MEMORY, Lane(1, [5], 7), [6]), "a snapshot at 7 has 3 pages"),
        (lambda p: p.write_pages(MEMORY, [1] * 5, []), "5 pages come in pieces of 4, got 0 pieces"),
    ],
    ids=["slot twice", "no room", "slot 0", "page 0", "long chunk", "cut", "snapshot", "pieces"],
)
def test_refuses_what_does_not_fit(programs: Programs, call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(programs)


def test_refuses_models_that_the_memory_is_not_for() -> None:
    model = random_model(CONFIG, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="the model is of bfloat16, the layout of float32"):
        Programs(model, LAYOUT)
    half = jnp.dtype(jnp.bfloat16)
    with pytest.raises(ValueError, match="a CPU does not keep the bits of a bfloat16 pool"):
        Programs(model, dataclasses.replace(LAYOUT, dtype=half, window_dtype=half))
    with pytest.raises(ValueError, match="the layout is of another model"):
        Programs(random_model(small_config()), LAYOUT)
