"""The layers against their definition in float64, and their promises to whoever uses one alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import layer_definitions as definition
import numpy as np
import pytest
from flax import nnx

from kda_jax.layers import (
    KimiDeltaAttention,
    Mlp,
    MultiHeadLatentAttention,
    Projections,
    ResidualMix,
    Residuals,
)
from measure import assert_close
from pallas_kernels import SituGlu

WIDTH = 24
KDA_OPTIONS: dict[str, dict[str, Any]] = {
    "kimi-linear": {},
    "bounded-full-rank": {"gate_lower_bound": -5.0, "full_rank_gate": True},
    "value-heads-of-their-own": {"num_v_heads": 4, "v_head_dim": 6, "conv_size": 3},
}
MLA_OPTIONS: dict[str, dict[str, Any]] = {
    "kimi-linear": {},
    "k3": {"q_lora_rank": 10, "output_gate": True},
    "no-shared-key": {"qk_rope_head_dim": 0},
}


def make_kda(**options: Any) -> KimiDeltaAttention:
    layer = KimiDeltaAttention(WIDTH, 2, 8, rngs=nnx.Rngs(0), **options)
    layer.o_norm = nnx.Param(jnp.linspace(0.5, 1.5, layer.v_head_dim, dtype=jnp.float32))
    return layer


def make_mla(**options: Any) -> MultiHeadLatentAttention:
    sizes: dict[str, Any] = dict(kv_lora_rank=12, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=6)
    layer = MultiHeadLatentAttention(WIDTH, 3, rngs=nnx.Rngs(1), **sizes | options)
    layer.kv_norm = nnx.Param(jnp.linspace(0.5, 1.5, 12, dtype=jnp.float32))
    return layer


def inputs(rows: int, tokens: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, tokens, WIDTH)), jnp.float32)


@pytest.mark.parametrize("options", KDA_OPTIONS.values(), ids=KDA_OPTIONS)
def test_kda_is_its_definition(options: dict[str, Any]) -> None:
    layer, x = make_kda(**options), inputs(2, 70)
    y, state = jax.jit(lambda x: layer(x))(x)
    for row in range(2):
        want = definition.kda(layer, definition.wide(x[row]))
        assert_close("y", want.y, y[row], 2e-6)
        assert_close("recurrent", want.recurrent, state.recurrent[row], 2e-6)
        assert_close("window", want.window, state.conv[row], 2e-6)
    assert state.position.tolist() == [70, 70]


@pytest.mark.parametrize("options", MLA_OPTIONS.values(), ids=MLA_OPTIONS)
def test_mla_is_its_definition(options: dict[str, Any]) -> None:
    layer, x = make_mla(**options), inputs(2, 70)
    y, state = jax.jit(lambda x: layer(x))(x)
    for row in range(2):
        want, latent = definition.mla(layer, definition.wide(x[row]))
        assert_close("y", want, y[row], 2e-6)
        assert_close("latent", latent, state.latent[row], 2e-6)
    assert state.position.tolist() == [70, 70]


@pytest.mark.parametrize("make", [make_kda, make_mla])
def test_one_token_at_a_time_is_the_sequence(make: Any) -> None:
    layer, x = make(), inputs(2, 9)
    whole, end = jax.jit(lambda x: layer(x))(x)
    state = layer.empty(2) if make is make_kda else layer.empty(2, capacity=9)
    step = jax.jit(lambda x, state: layer(x, state))
    outs = []
    for t in range(9):
        y, state = step(x[:, t : t + 1], state)
        outs.append(y[:, 0])
    assert_close("y", whole, jnp.stack(outs, axis=1), 2e-6)
    for name in end._fields:
        assert_close(name, getattr(end, name), getattr(state, name), 2e-6)


@pytest.mark.optimised
@pytest.mark.parametrize("make", [make_kda, make_mla])
def test_states_at_boundaries_are_those_of_shorter_calls(make: Any) -> None:
    layer, x = make(), inputs(2, 7)
    counts = jnp.asarray([[1, 5], [7, 0]], jnp.int32)
    _, end, at = jax.jit(lambda x, counts: layer(x, boundaries=counts))(x, counts)
    shorter = jax.jit(lambda x, lengths: layer(x, lengths=lengths))
    for column in range(2):
        _, want = shorter(x, counts[:, column])
        np.testing.assert_array_equal(at.position[:, column], counts[:, column])
        if make is make_mla:
            np.testing.assert_array_equal(at.latent, end.latent)
        else:
            np.testing.assert_array_equal(at.recurrent[:, column], want.recurrent)
            np.testing.assert_array_equal(at.conv[:, column], want.conv)


def test_nothing_is_written_beyond_the_capacity() -> None:
    layer, x = make_mla(), inputs(2, 4)
    _, full = layer(x, layer.empty(2, capacity=4))
    call = jax.jit(lambda x, state, n: layer(x, state, lengths=n))  # outside jit it is an error
    for tokens, lengths in ((1, None), (3, None), (3, jnp.asarray([3, 0], jnp.int32))):
        _, after = call(x[:, :tokens], full, lengths)
        np.testing.assert_array_equal(after.latent, full.latent)


@pytest.mark.parametrize("make", [make_kda, make_mla])
def test_bfloat16_stays_near_float32(make: Any) -> None:
    layer = make()
    half = make(dtype=jnp.bfloat16)
    graphdef, _ = nnx.split(half)
    like = nnx.state(half)
    params = jax.tree.map(lambda a, b: a.astype(b.dtype), nnx.state(layer), like)
    half = nnx.merge(graphdef, params)
    x = inputs(1, 40).astype(jnp.bfloat16)
    y, _ = jax.jit(lambda x: half(x))(x)
    want, _ = jax.jit(lambda x: layer(x))(x.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16
    assert_close("y", want, y, 1e-2)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_kda, {}),
        (make_kda, {"gate_lower_bound": -5.0, "full_rank_gate": True, "num_v_heads": 4}),
        (make_mla, {"q_lora_rank": 10, "output_gate": True}),
    ],
    ids=["kda", "kda-k3", "mla-k3"],
)
def test_every_parameter_has_a_gradient(make: Any, options: dict[str, Any]) -> None:
    graphdef, params = nnx.split(make(**options))
    x = inputs(2, 5)
    gradients = jax.jit(jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(x)[0] ** 2)))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, jax.tree_util.keystr(path)


def test_starts_with_the_usual_values() -> None:
    layer = KimiDeltaAttention(64, 32, 16, rngs=nnx.Rngs(0))
    rate, step = jnp.exp(layer.A_log[...]), jax.nn.softplus(layer.dt_bias[...])
    assert 1 <= float(rate.min()) < 2.5 and 14.5 < float(rate.max()) <= 16
    assert 0.99e-3 <= float(step.min()) < 1.3e-3 and 8e-2 < float(step.max()) <= 1.01e-1
    assert float(layer.in_proj.kernel[...].std()) == pytest.approx(64**-0.5, rel=0.02)
    assert float(layer.o_proj.kernel[...].std()) == pytest.approx(512**-0.5, rel=0.02)
    bounded = KimiDeltaAttention(8, 3, 4, gate_lower_bound=-5.0, rngs=nnx.Rngs(0))
    assert not np.asarray(bounded.A_log[...]).any()


def test_projections_lie_side_by_side() -> None:
    layer = Projections(3, (2, 1, 4), rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3)), jnp.float32)
    kernel = layer.kernel[...]
    for got, part in zip(layer(x), (kernel[:, :2], kernel[:, 2:3], kernel[:, 3:])):
        assert_close("part", x @ part, got, 1e-6)


def test_mlp_is_swiglu() -> None:
    layer, x = Mlp(4, 6, rngs=nnx.Rngs(0)), jnp.linspace(-2.0, 2.0, 8, dtype=jnp.float32).reshape(2, 4)
    gate, up = np.split(definition.wide(x) @ definition.wide(layer.gate_up.kernel), 2, axis=-1)
    want = (gate * definition.sigmoid(gate) * up) @ definition.wide(layer.down.kernel)
    assert_close("y", want, layer(x), 1e-6)


def test_mlp_takes_another_activation() -> None:
    layer = Mlp(4, 6, activation=SituGlu(2.0, 3.0), rngs=nnx.Rngs(0))
    x = jnp.linspace(-9.0, 9.0, 8, dtype=jnp.float32).reshape(2, 4)
    gate, up = np.split(definition.wide(x) @ definition.wide(layer.gate_up.kernel), 2, axis=-1)
    hidden = 2 * np.tanh(gate / 2) * definition.sigmoid(gate) * 3 * np.tanh(up / 3)
    assert_close("y", hidden @ definition.wide(layer.down.kernel), layer(x), 1e-6)


def test_residuals_are_a_sum_until_a_block_closes() -> None:
    one, two, three = (jnp.full((1, 1, 2), value, jnp.float32) for value in (1, 2, 3))
    x = Residuals(one).add(two)
    assert (float(x.sum[0, 0, 0]), x.blocks) == (3, None)
    y = x.close(three).add(one).close(two)
    assert float(y.sum[0, 0, 0]) == 2
    np.testing.assert_array_equal(y.blocks, [[[[3, 3]]], [[[4, 4]]]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_residual_mix_is_its_definition(dtype: type) -> None:
    mix = ResidualMix(WIDTH, eps=1e-5, rngs=nnx.Rngs(0), dtype=dtype)
    mix.norm = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH).astype(dtype))
    values = [inputs(2, 7, seed).astype(dtype) * dtype(10.0**seed) for seed in range(4)]
    x = Residuals(values[-1], jnp.stack(values[:-1]))
    stacked = np.stack(list(map(definition.wide, values)))
    normal = definition.rms_norm(stacked, definition.wide(mix.norm), 1e-5)
    scores = (normal @ definition.wide(mix.proj))[..., 0]
    weights = np.exp(scores - scores.max(0))
    want = np.einsum("ebt,ebtd->btd", weights / weights.sum(0), stacked)
    got = jax.jit(mix)(x)
    assert got.dtype == dtype
    assert_close("mixed", want, got, 1e-6 if dtype == jnp.float32 else 5e-3)
    np.testing.assert_array_equal(mix(Residuals(values[0])), values[0])


def test_refuses_value_heads_that_share_no_key_head() -> None:
    with pytest.raises(ValueError, match="multiple of num_heads=2"):
        KimiDeltaAttention(8, 2, 4, num_v_heads=3, rngs=nnx.Rngs(0))
