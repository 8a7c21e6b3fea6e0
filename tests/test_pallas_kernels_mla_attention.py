"""Latent attention: definition, cuts to the bit, pages, rubbish behind the rows, gradients."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from measure import assert_close
from pallas_kernels import mla_attention

HEADS, RANK, ROPE = 2, 24, 8
SCALE = 0.3
KERNELS = ["triton-interpret", "tpu-interpret"]
BACKENDS = ["xla", *KERNELS]


def inputs(batch: int, num_tokens: int, capacity: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, num_tokens, HEADS, RANK + ROPE)).astype(np.float32)
    return q, rng.standard_normal((batch, capacity, RANK + ROPE)).astype(np.float32)


attend = jax.jit(functools.partial(mla_attention, rank=RANK, scale=SCALE), static_argnames="implementation")


def by_hand(
    q: np.ndarray, latents: np.ndarray, start: int, rank: int = RANK, scale: float = SCALE
) -> np.ndarray:
    """One row of the batch in float64 NumPy: q [T, H, R+P], latents [S, R+P]."""
    out = np.zeros((*q.shape[:2], rank))
    for i, h in np.ndindex(*q.shape[:2]):
        rows = latents[: start + i + 1].astype(np.float64)
        weights = np.exp(scale * rows @ q[i, h])
        out[i, h] = weights @ rows[:, :rank] / weights.sum()
    return out


@pytest.mark.parametrize(
    ("num_tokens", "capacity", "start", "implementation"),
    [
        *((1, 3001, [2600, 1024], name) for name in ("reference", *BACKENDS)),
        *((70, 520, [0, 449], name) for name in ("reference", *BACKENDS)),
        *((2, 700, [511, 255], name) for name in ("reference", "xla")),
        *((1, 1, [0, 0], name) for name in ("reference", "xla")),
    ],
)
def test_matches_the_formula(num_tokens: int, capacity: int, start: list[int], implementation: str) -> None:
    q, latents = inputs(2, num_tokens, capacity)
    dirty = latents.copy()
    dirty[0, start[0] + num_tokens :] = np.nan
    dirty[1, start[1] + num_tokens :] = 1e30
    got = attend(q, dirty, start=np.array(start), implementation=implementation)
    for b in range(2):
        assert_close("out", by_hand(q[b], latents[b], start[b]), got[b], 1e-6)


@pytest.mark.parametrize(
    ("cuts", "capacities", "implementation"),
    [
        ([64], [200], "xla"),
        ([128], [256, 700], "xla"),
        ([192], [700, 200], "xla"),
        ([64, 128, 192], [64, 700, 256, 200], "xla"),
        ([101], [700, 200], "triton-interpret"),  # any cut will do
    ],
    ids=str,
)
@pytest.mark.optimised
def test_cuts_keep_every_bit(cuts: list[int], capacities: list[int], implementation: str) -> None:
    q, latents = inputs(1, 200, 200)
    whole = attend(q, latents, implementation=implementation)
    for n, (first, last) in enumerate(zip([0, *cuts], [*cuts, 200])):
        capacity = capacities[n % len(capacities)]
        buffer = np.full((1, capacity, RANK + ROPE), np.nan, np.float32)
        buffer[:, :last] = latents[:, :last]
        part = attend(q[:, first:last], buffer, start=np.array([first]), implementation=implementation)
        np.testing.assert_array_equal(part, whole[:, first:last])


@pytest.mark.parametrize(("cuts", "implementation"), [([640, 704], "xla"), ([333], "tpu-interpret")])
@pytest.mark.optimised
def test_a_cut_through_many_key_blocks_keeps_every_bit(cuts: list[int], implementation: str) -> None:
    q, latents = inputs(1, 1100, 1100)
    whole = attend(q, latents, implementation=implementation)
    for first, last in zip([0, *cuts], [*cuts, 1100]):
        options = {"start": np.array([first]), "implementation": implementation}
        part = attend(q[:, first:last], latents[:, :last], **options)
        np.testing.assert_array_equal(part, whole[:, first:last])


@pytest.mark.parametrize(
    ("num_tokens", "capacity", "implementation"),
    [
        *((tokens, size, name) for tokens, size in ((1, 2500), (40, 600)) for name in BACKENDS[:2]),
        (40, 600, "tpu-interpret"),
    ],
)
@pytest.mark.optimised
def test_a_batch_is_its_rows_to_the_bit(num_tokens: int, capacity: int, implementation: str) -> None:
    q, latents = inputs(4, num_tokens, capacity)
    start, lengths = np.array([0, 3, 255, capacity - 40]), np.array([num_tokens, 1, 0, num_tokens])
    for b in range(4):  # rows behind a row's own end are rubbish, also where padded queries would stand
        latents[b, start[b] + lengths[b] :] = np.nan
    together = attend(q, latents, start=start, lengths=lengths, implementation=implementation)
    for b, length in enumerate(lengths):
        np.testing.assert_array_equal(together[b, length:], 0)
        if length:  # alone, in a buffer of another size
            row, rows = slice(b, b + 1), 1000 if start[b] < 900 else 3600
            buffer = np.full((1, rows, RANK + ROPE), 1e30, np.float32)
            buffer[0, : start[b] + length] = latents[b, : start[b] + length]
            options = {"start": start[row], "lengths": lengths[row], "implementation": implementation}
            np.testing.assert_array_equal(together[b], attend(q[row], buffer, **options)[0])


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("later", [37, 64])
@pytest.mark.optimised
def test_no_bit_depends_on_a_later_token(later: int, implementation: str) -> None:
    q, latents = inputs(1, 80, 100)
    changed = q.copy(), latents.copy()
    changed[0][:, later:], changed[1][:, 20 + later :] = 7.0, 1e30
    options = {"start": np.array([20]), "implementation": implementation}
    before, after = attend(q, latents, **options), attend(*changed, **options)
    np.testing.assert_array_equal(after[:, :later], before[:, :later])
    assert (np.asarray(after[:, later]) != np.asarray(before[:, later])).all()


@pytest.mark.parametrize(
    ("page_size", "num_tokens", "implementation"),
    [
        *((size, tokens, "xla") for size in (16, 60, 256, 1024) for tokens in (1, 66)),
        *((size, tokens, "triton-interpret") for size, tokens in ((60, 66), (64, 1))),
        (64, 66, "tpu-interpret"),
    ],
)
@pytest.mark.optimised
def test_pages_are_contiguous_rows_to_the_bit(page_size: int, num_tokens: int, implementation: str) -> None:
    q, latents = inputs(2, num_tokens, 600)
    start = np.array([600 - num_tokens, 5])
    pages = -(-600 // page_size)
    order = np.random.default_rng(1).permutation(2 * pages + 1)
    table = order[: 2 * pages].reshape(2, pages)
    pool = np.full((2 * pages + 1, page_size, RANK + ROPE), np.nan, np.float32)
    padded = np.pad(latents, ((0, 0), (0, pages * page_size - 600), (0, 0)), constant_values=1e30)
    pool[table] = padded.reshape(2, pages, page_size, -1)
    flat = attend(q, latents, start=start, implementation=implementation)
    paged = attend(q, pool, start=start, page_table=table, implementation=implementation)
    np.testing.assert_array_equal(paged, flat)


@pytest.mark.parametrize(
    ("num_tokens", "layout", "implementation"),
    [
        *((tokens, layout, "xla") for tokens in (1, 2, 150) for layout in ("contiguous", "pages")),
        *((2, "contiguous", kernels) for kernels in KERNELS),
    ],
)
def test_gradients_match_float64(num_tokens: int, layout: str, implementation: str) -> None:
    q, latents = inputs(2, num_tokens, 300)
    options = {
        "start": np.array([300 - num_tokens, 7]),
        "lengths": np.array([num_tokens, -(-num_tokens // 2)]),
    }
    if layout == "pages":  # both sequences share their first page
        latents = latents.reshape(12, 50, RANK + ROPE)
        options["page_table"] = np.array([[0, 1, 2, 3, 4, 5], [0, 7, 8, 9, 10, 11]])
    weight = np.random.default_rng(5).standard_normal((2, num_tokens, HEADS, RANK))

    def loss(implementation, q, latents):
        out = mla_attention(q, latents, rank=RANK, scale=SCALE, implementation=implementation, **options)
        return (out * weight.astype(out.dtype)).sum()

    gradient = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)
    got = gradient(implementation, q, latents)
    with jax.enable_x64(True):
        exact = gradient("reference", *(jnp.asarray(a, jnp.float64) for a in (q, latents)))
        exact = [np.asarray(a) for a in exact]
    for name, reference, mine in zip(["dq", "dlatents"], exact, got):
        assert_close(name, reference, mine, 1e-6)


def test_padding_may_reach_behind_the_capacity() -> None:
    q, latents = inputs(1, 64, 70)
    got = attend(q, latents, start=np.array([61]), lengths=np.array([9]))
    assert_close("out", by_hand(q[0, :9], latents[0], 61), got[0, :9], 1e-6)
    np.testing.assert_array_equal(got[0, 9:], 0)


def test_rubbish_never_reaches_a_gradient() -> None:
    q, latents = inputs(1, 5, 40)
    dirty = latents.copy()
    dirty[:, 12:] = np.nan
    gradient = jax.jit(jax.grad(lambda *args: attend(*args, start=np.array([7])).sum(), (0, 1)))
    for got, clean in zip(gradient(q, dirty), gradient(q, latents)):
        np.testing.assert_array_equal(got, clean)


def test_bfloat16_inputs_softmax_in_float32() -> None:
    q, latents = (jnp.asarray(a, jnp.bfloat16) for a in inputs(2, 33, 300))
    got = attend(q, latents, start=np.array([200, 0]))
    assert got.dtype == jnp.bfloat16
    exact = attend(q.astype(jnp.float32), latents.astype(jnp.float32), start=np.array([200, 0]))
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))
    gradient = jax.jit(jax.grad(lambda *args: attend(*args).astype(jnp.float32).sum(), (0, 1)))
    assert [g.dtype for g in gradient(q, latents)] == [jnp.bfloat16, jnp.bfloat16]


@pytest.mark.parametrize(
    ("num_tokens", "queries_dtype", "latents_dtype"),
    [
        (33, jnp.bfloat16, jnp.bfloat16),
        (1, jnp.bfloat16, jnp.float8_e4m3fn),
        (33, jnp.float32, jnp.float8_e4m3fn),
    ],
    ids=["bf16", "bf16 and fp8", "f32 and fp8"],
)
@pytest.mark.parametrize("implementation", ["reference", *BACKENDS])
def test_narrow_latents_are_the_numbers_they_hold(
    num_tokens: int, implementation: str, queries_dtype: jnp.dtype, latents_dtype: jnp.dtype
) -> None:
    q, latents = inputs(2, num_tokens, 1400)
    q, latents = jnp.asarray(q, queries_dtype), jnp.asarray(latents, latents_dtype)
    start = np.array([1300, 0])
    got = attend(q, latents, start=start, implementation=implementation)
    assert got.dtype == queries_dtype
    wide = (np.asarray(x.astype(jnp.float32)) for x in (q, latents))
    exact = [by_hand(*row) for row in zip(*wide, start)]
    assert_close("out", exact, got.astype(jnp.float32), 5e-6 if queries_dtype == jnp.float32 else 3e-3)


@pytest.mark.parametrize(
    ("num_tokens", "heads", "rank", "rope"), [(9, 3, 20, 7), (1, 1, 1, 0), (1, 20, 136, 12)]
)
@pytest.mark.parametrize("implementation", KERNELS)
def test_any_width_and_any_number_of_heads(
    num_tokens: int, heads: int, rank: int, rope: int, implementation: str
) -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((1, num_tokens, heads, rank + rope)).astype(np.float32)
    latents = rng.standard_normal((1, 40, rank + rope)).astype(np.float32)
    call = jax.jit(functools.partial(mla_attention, rank=rank, start=[25], implementation=implementation))
    for b, out in enumerate(call(q, latents)):
        scale = (rank + rope) ** -0.5
        assert_close("out", by_hand(q[b], latents[b], 25, rank, scale), out, 2e-6)


@pytest.mark.optimised
def test_decode_inside_a_scan_that_carries_the_rows() -> None:
    q, latents = inputs(2, 5, 300)
    start = np.array([250, 3])

    def token(carry, now):
        rows, position = carry
        query, row = now
        rows = rows.at[jnp.arange(2), position].set(row)
        return (rows, position + 1), attend(query[:, None], rows, start=position)[:, 0]

    new = np.stack([latents[b, s : s + 5] for b, s in enumerate(start)], axis=1)
    empty = np.where((np.arange(300) < start[:, None])[..., None], latents, np.nan).astype(np.float32)
    _, out = jax.jit(lambda *args: jax.lax.scan(token, args[:2], args[2:]))(
        empty, start, q.swapaxes(0, 1), new
    )
    for b in range(2):
        assert_close("out", by_hand(q[b], latents[b], start[b]), out[:, b], 1e-6)


@pytest.mark.parametrize("implementation", ["reference", *BACKENDS])
@pytest.mark.parametrize(("tokens", "capacity"), [(0, 5), (3, 0)])
def test_of_nothing_there_is_nothing(tokens: int, capacity: int, implementation: str) -> None:
    q, latents = inputs(2, tokens, capacity)
    got = attend(q, latents, lengths=np.array([0, 0]), implementation=implementation)
    np.testing.assert_array_equal(got, np.zeros((2, tokens, HEADS, RANK)))


BIG = jax.ShapeDtypeStruct((2**23, 8, 32), jnp.float8_e4m3fn)  # 2^31 numbers
NARROW = jax.ShapeDtypeStruct((2**23, 8, 31), jnp.float8_e4m3fn)  # as many when its rows are made whole


@pytest.mark.parametrize(
    ("name", "latents", "options", "message"),
    [
        ("triton-interpret", jnp.zeros((2, 9, 32), jnp.int8), {}, "latents in int8"),
        ("tpu-interpret", jnp.zeros((2, 9, 32), jnp.int8), {}, "latents in int8"),
        ("triton-interpret", jnp.zeros((2, 9, 2050)), {"rank": 2049}, "2048 channels at most, got rank=2049"),
        ("triton", BIG, {"page_table": np.zeros((2, 9), np.int32)}, "2147483648 one-byte numbers"),
        ("triton", NARROW, {"page_table": np.zeros((2, 9), np.int32)}, "2147483648 one-byte numbers"),
        ("triton", jnp.zeros((2, 9, 32), jnp.float8_e4m3fn), {}, "8.9 or higher, this one has .8, 0."),
        ("tpu", jnp.zeros((4, 60, 32)), {"page_table": np.zeros((2, 2), np.int32)}, "64 rows, got 60"),
    ],
    ids=["triton dtype", "tpu dtype", "rank", "large pool", "pool of narrow rows", "old GPU", "page"],
)
def test_a_backend_refuses(
    name: str, latents: jax.Array, options: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("pallas_kernels.mla_attention.triton.forward")
    monkeypatch.setattr(module, "_capability", lambda: (8, 0))
    q = jnp.zeros((2, 4, 3, latents.shape[2]))
    call = functools.partial(mla_attention, **({"rank": RANK} | options), implementation=name)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, q, latents)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents": jnp.zeros((2, 9, 31))}, "do not fit"),
        ({"latents": jnp.zeros((1, 9, 32))}, "page_table"),
        ({"rank": 33}, "1..32"),
        ({"start": [0, 6]}, "start . lengths .* 0..9, got .4, 10."),
        ({"lengths": [0, 5]}, "0..4"),
        ({"page_table": [[0], [2]]}, "0..1"),
        ({"latents": jnp.zeros((2, 3, 32))}, "rows written"),
        ({"implementation": "cuda"}, "reference"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_says_what_is_wrong(change: dict, message: str) -> None:
    q, latents = map(jnp.asarray, inputs(2, 4, 9))
    with pytest.raises(ValueError, match=message):
        mla_attention(**({"q": q, "latents": latents, "rank": RANK} | change))
