"""How a prompt came to its state (its calls, its place in memory, drafts that were rejected, rows beside it) leaves no
trace in what is published and resumed."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cache.payload import same
from cache.retention.protocol import Kind
from kda_jax.engine import cut
from kda_jax.forward import SplitModel, prefill, split
from kda_jax.state import KDAState, MLAState, ModelState, empty, grow
from measure import assert_close
from model_site import STEP, ModelSite, decode_on
from random_model import random_model, small_config
from same_state import assert_same_state

CAPACITY, LONG = 512, 1280
ROUNDING = 5e-6
LONG_CONFIG = small_config(model_max_length=2048)


@pytest.fixture(scope="module")
def parts() -> SplitModel:
    return split(random_model(small_config()))


@pytest.fixture(scope="module")
def long_parts() -> SplitModel:
    return split(random_model(LONG_CONFIG))


def text(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 67, num_tokens)


# calls


@pytest.mark.optimised
def test_calls_of_128_and_of_512_make_the_same_checkpoints_to_the_bit(parts: SplitModel) -> None:
    """And whoever resumes from one goes on with calls of any length on the grid."""
    tokens = text(1, 500)
    site = ModelSite(parts, capacity=CAPACITY, budget=10**6)
    served = site.serve(tokens, marks=[384])
    whole, end, (state,) = prefill(parts, tokens[None], None, boundaries=[384], capacity=CAPACITY)
    np.testing.assert_array_equal(served.logits, np.asarray(whole)[0])
    assert_same_state(end, served.end)
    _, plan = site.look(tokens[:385])
    resumed = site.resume(tokens, plan)
    assert plan.boundary == 384 and resumed is not None
    assert_same_state(state, resumed)
    logits, again, _ = site.read(tokens[384:], state, [])
    np.testing.assert_array_equal(logits, served.logits[384:])
    assert_same_state(end, again)


@pytest.mark.optimised
def test_on_the_grid_a_hit_has_the_bits_of_a_cold_run_and_off_it_it_is_within_rounding(
    parts: SplitModel,
) -> None:
    """320 and 300 tokens. Both states are kept in float32, as they are while they run."""
    tokens = text(2, 320 + 64)
    site = ModelSite(parts, grid=1, capacity=CAPACITY, budget=10**6)
    _, state, _ = site.read(tokens[:STEP], None, [])
    _, state, _ = site.read(tokens[STEP : 2 * STEP], state, [])
    for boundary in (320, 300):
        logits, _, (at,) = site.read(tokens[2 * STEP :], state, [boundary])
        site.put(tokens[:boundary], at, Kind.MARK)
        _, plan = site.look(tokens[: boundary + 1])
        resumed = site.resume(tokens, plan)
        assert plan.boundary == boundary and resumed is not None
        kept = [layer.recurrent.dtype for layer in resumed.layers if isinstance(layer, KDAState)]
        assert kept == [jnp.float32]
        want, (got, _, _) = logits[boundary - 2 * STEP :], site.read(tokens[boundary:], resumed, [])
        assert_close("logits", want, got, ROUNDING)
        if boundary == 320:
            np.testing.assert_array_equal(got, want)


# memory that somebody else had


def in_memory_of(dirty: ModelState, state: ModelState, left: str = "") -> ModelState:
    """A state written over another's: its rows of latents over the first rows. `left` is a leaf that stays."""

    def write(old: KDAState | MLAState, new: KDAState | MLAState) -> KDAState | MLAState:
        if isinstance(old, KDAState):
            return new._replace(**{left: getattr(old, left)}) if left else new
        assert isinstance(new, MLAState)
        rows = int(new.position[0])
        latent = np.array(old.latent)
        latent[:, :rows] = np.asarray(new.latent)[:, :rows]
        return new._replace(latent=jnp.asarray(latent))

    return ModelState(tuple(map(write, dirty.layers, state.layers)))


@pytest.mark.parametrize("resumed", [128, 0], ids=["a hit", "cold"])
def test_what_a_slot_held_before_does_not_show(long_parts: SplitModel, resumed: int) -> None:
    """A read 1,000 tokens there. B resumes from a hit in its place, or begins cold: the bits are those of clean memory,
    with A's latents still behind B's. Leaving A's recurrent state or its window would show."""
    site = ModelSite(long_parts, grid=1, capacity=LONG, budget=10**7)
    dirty = site.serve(text(3, 1000)).end
    tokens = text(4, 128 + 100)
    site.serve(tokens[:128])
    _, plan = site.look(tokens[: resumed + 1])
    assert plan.boundary == resumed
    state = site.resume(tokens, plan) or empty(LONG_CONFIG, 1, LONG)
    want, end, _ = site.read(tokens[resumed:][:STEP], grow(state, LONG), [])
    got, same_end, _ = site.read(tokens[resumed:][:STEP], in_memory_of(dirty, state), [])
    np.testing.assert_array_equal(got, want)
    assert_same_state(end, same_end)
    for left in ("recurrent", "conv"):
        wrong, _, _ = site.read(tokens[resumed:][:STEP], in_memory_of(dirty, state, left), [])
        assert (wrong != want).any()


# drafts


@pytest.mark.parametrize("accepted", range(5))
def test_drafts_that_are_rejected_leave_no_trace(long_parts: SplitModel, accepted: int) -> None:
    """Four drafts, verified in one call that returns the state behind each; the one at the accepted length goes on as
    plain decoding does, and is published as such."""
    prompt = text(5, 200)
    site = ModelSite(long_parts, grid=1, capacity=LONG, budget=10**7)
    served = site.serve(prompt)
    first = int(served.logits[-1].argmax())
    plain, plain_end = decode_on(long_parts, first, jax.tree.map(jnp.copy, served.end), 5 + 8)
    boundaries = [len(prompt) + 1 + count for count in range(5)]

    def verify(drafts: Sequence[int]) -> tuple[np.ndarray, list[ModelState]]:
        call = np.array([[first, *drafts]])
        logits, _, at = prefill(long_parts, call, served.end, boundaries=boundaries, capacity=LONG)
        return np.asarray(logits)[0].argmax(axis=-1), at

    right = plain[1:5]
    drafts = right[:accepted] + [(token + 1) % 67 for token in right[accepted:]]
    chosen, at = verify(drafts)
    matching = chosen[:4] == drafts
    assert (4 if matching.all() else int(matching.argmin())) == accepted
    other, at_other = verify(right[:accepted] + [(token + 2) % 67 for token in right[accepted:]])
    assert_same_state(at[accepted], at_other[accepted])
    assert chosen[accepted] == other[accepted] == plain[accepted + 1]
    if accepted < 4:
        assert not all(map(np.array_equal, jax.tree.leaves(at[accepted]), jax.tree.leaves(at[4])))
    history = np.append(prompt, plain[: accepted + 1])
    site.put(history, at[accepted], Kind.GENERATION_END)
    _, plan = site.look(np.append(history, 0))
    assert plan.boundary == len(history)
    resumed = site.resume(history, plan)
    assert resumed is not None
    rest, end = decode_on(long_parts, plain[accepted + 1], grow(resumed, LONG), 13 - (accepted + 1))
    assert rest == plain[accepted + 1 :]
    for want, got in zip(plain_end.layers, end.layers, strict=True):
        assert int(got.position[0]) == len(prompt) + 13
        if isinstance(want, KDAState) and isinstance(got, KDAState):
            assert_close("recurrent", want.recurrent, got.recurrent, ROUNDING)
            assert_close("conv", want.conv, got.conv, ROUNDING)


# rows beside it


@pytest.mark.optimised
def test_rows_of_padding_change_no_live_row_in_a_hundred_steps(parts: SplitModel) -> None:
    """Three live rows of eight, one of them row 0. What is cut from a row then is what it would be alone, and the rows
    of padding are as they were."""
    steps, live, rows = 100, 3, 8
    tokens = np.random.default_rng(6).integers(0, 67, (rows, steps + 1))
    site = ModelSite(parts, capacity=CAPACITY, budget=10**6)
    _, start = prefill(parts, tokens[:, :1], None, capacity=CAPACITY)
    state, alone = start, {row: row_of(start, row) for row in (0, 2)}
    for step in range(1, steps + 1):
        call = np.where(np.arange(rows)[:, None] < live, tokens[:, step : step + 1], 0)
        logits, state = prefill(parts, call, state, [1] * live + [0] * (rows - live), capacity=CAPACITY)
        for row, mine in alone.items():
            want, alone[row], _ = site.read(call[row], mine, [])
            np.testing.assert_array_equal(np.asarray(logits)[row], want)
    for row, mine in alone.items():
        got, want = cut(row_of(state, row), 64), cut(mine, 64)
        assert same(got.state, want.state) and len(got.pages) == 1
        assert all(map(same, got.pages, want.pages))
    for row in range(live, rows):
        assert_same_state(start, row_of(state, row), slice(row, row + 1))


def row_of(state: ModelState, row: int) -> ModelState:
    """One row of a batch, as a state of its own."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[row : row + 1]), state)
