"""The router by itself (a norm behind the experts would hide a wrong scale), and the sparse layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import layer_definitions as definition
import numpy as np
import pytest
from flax import nnx

from kda_jax.config import ModelConfig
from kda_jax.layers import Packed, PackedMatrices, Router, SparseMoE
from measure import assert_close
from pallas_kernels import unpack_mxfp4

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not-renormalised": {"moe_renormalize": False, "routed_scaling_factor": 1.0},
    "two-of-four-groups": {"num_expert_groups": 4, "topk_groups": 2},
    "one-of-two-groups": {"num_expert_groups": 2, "topk_groups": 1, "experts_per_token": 4},
    "all-groups": {"num_expert_groups": 4, "topk_groups": 4},
}


def make_config(**options: Any) -> ModelConfig:
    small = dict(hidden_size=16, num_experts=8, experts_per_token=3, moe_intermediate_size=6)
    return dataclasses.replace(ModelConfig.tiny(), **{**small, "routed_scaling_factor": 2.446, **options})


def with_bias(router: Router) -> Router:
    """A bias strong enough to change the choice, and to make rated scores negative."""
    router.bias = nnx.Param(jnp.asarray(np.random.default_rng(3).normal(-0.5, 0.4, 8), jnp.float32))
    return router


def route(router: Router, config: ModelConfig, x: np.ndarray) -> list[dict[int, float]]:
    """The definition, one token at a time: expert -> weight."""
    chosen = []
    for token in definition.wide(x):
        scores = definition.sigmoid(token @ definition.wide(router.kernel))
        rated = scores + definition.wide(router.bias)
        groups = np.split(np.arange(config.num_experts), config.num_expert_groups)
        worth = [np.sort(rated[group])[-2:].sum() for group in groups]
        kept = np.argsort(worth)[::-1][: config.topk_groups]
        allowed = np.concatenate([groups[group] for group in kept])
        best = allowed[np.argsort(rated[allowed])[::-1][: config.experts_per_token]]
        total = scores[best].sum() + 1e-20 if config.moe_renormalize else 1.0
        chosen.append({int(e): scores[e] / total * config.routed_scaling_factor for e in best})
    return chosen


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_experts_and_weights_are_those_of_the_definition(options: dict[str, Any]) -> None:
    config = make_config(**options)
    router = with_bias(Router(config, rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).standard_normal((5, 40, 16)).astype(np.float32)
    experts, weights = jax.jit(lambda x: router(x))(x)
    assert (experts.dtype, weights.dtype) == (jnp.int32, jnp.float32)
    for want, ids, got in zip(
        route(router, config, x.reshape(-1, 16)),
        np.asarray(experts).reshape(200, -1),
        weights.reshape(200, -1),
    ):
        assert set(want) == set(ids.tolist())
        assert_close("weights", [want[e] for e in ids.tolist()], got, 1e-6)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    router = Router(make_config(), rngs=nnx.Rngs(0))
    x = jnp.ones((1, 16), jnp.float32)
    before = router(x)
    router.bias = nnx.Param(jnp.full((8,), 7.0, jnp.float32))
    after = router(x)
    np.testing.assert_array_equal(before.experts, after.experts)
    np.testing.assert_array_equal(before.weights, after.weights)


def test_of_equal_experts_the_lower_id_wins() -> None:
    config = make_config()
    router = Router(config, rngs=nnx.Rngs(0))
    router.kernel = nnx.Param(jnp.zeros((16, 8), jnp.float32))
    experts, weights = router(jnp.ones((70, 16), jnp.float32))
    assert experts.tolist() == [[0, 1, 2]] * 70
    np.testing.assert_allclose(weights, 2.446 / 3, rtol=1e-6)


def test_half_precision_input_is_rated_in_float32() -> None:
    router = Router(make_config(), rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((9, 16)), jnp.bfloat16)
    half, full = router(x), router(x.astype(jnp.float32))
    np.testing.assert_array_equal(half.weights, full.weights)


def test_gradients_reach_the_kernel_through_the_weights_only() -> None:
    router = with_bias(Router(make_config(), rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(router)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((9, 16)), jnp.float32)
    gradients = jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(x).weights ** 2))(params)
    assert np.abs(gradients["kernel"][...]).max() > 0
    assert not np.asarray(gradients["bias"][...]).any()


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_a_token_goes_through_its_experts_and_the_shared_ones(tokens: int, shared: int) -> None:
    config = make_config(num_shared_experts=shared)
    moe = SparseMoE(config, rngs=nnx.Rngs(0))
    with_bias(moe.router)
    x = np.random.default_rng(0).standard_normal((1, tokens, 16)).astype(np.float32)
    wide = definition.wide
    assert isinstance(moe.w_gate_up, nnx.Param) and isinstance(moe.w_down, nnx.Param)

    def swiglu(token, gate_up, down):
        gate, up = np.split(token @ gate_up, 2)
        return (gate * definition.sigmoid(gate) * up) @ down

    want = []
    for token, weights in zip(wide(x[0]), route(moe.router, config, x[0])):
        y = sum(
            weight * swiglu(token, wide(moe.w_gate_up[...][e]), wide(moe.w_down[...][e]))
            for e, weight in weights.items()
        )
        if moe.shared is not None:
            y = y + swiglu(token, wide(moe.shared.gate_up.kernel), wide(moe.shared.down.kernel))
        want.append(y)
    assert_close("y", np.stack(want)[None], jax.jit(lambda x: moe(x))(x), 2e-6)
    assert (moe.shared is None) == (shared == 0)
    np.testing.assert_array_equal(moe.route(jnp.asarray(x)).experts, moe.router(jnp.asarray(x)).experts)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("packed", [False, True], ids=["numbers", "mxfp4"])
def test_experts_may_work_on_latents(packed: bool, norm: bool) -> None:
    """The router and the shared experts see the token itself; the norm stands behind the weighted sum."""
    options: dict[str, Any] = dict(
        routed_expert_hidden_size=32, moe_intermediate_size=32, latent_moe_norm=norm
    )
    config = make_config(
        **options, quantization="mxfp4" if packed else None, situ_beta=1.0, situ_linear_beta=2.0
    )
    moe, wide = SparseMoE(config, rngs=nnx.Rngs(0)), definition.wide
    with_bias(moe.router)
    if moe.latent_norm is not None:
        moe.latent_norm = nnx.Param(jnp.linspace(0.5, 1.5, 32, dtype=jnp.float32))
    if isinstance(moe.w_gate_up, PackedMatrices) and isinstance(moe.w_down, PackedMatrices):
        gate_up, down = (wide(unpack_mxfp4(m())).swapaxes(1, 2) for m in (moe.w_gate_up, moe.w_down))
    else:
        gate_up, down = wide(moe.w_gate_up), wide(moe.w_down)
    assert moe.shared is not None and moe.latent_down is not None and moe.latent_up is not None

    def mlp(token, gate_up, down):
        gate, up = np.split(token @ gate_up, 2)
        return (np.tanh(gate) * definition.sigmoid(gate) * 2 * np.tanh(up / 2)) @ down

    x, want = np.random.default_rng(0).standard_normal((1, 9, 16)).astype(np.float32), []
    for token, weights in zip(wide(x[0]), route(moe.router, config, x[0])):
        latent = token @ wide(moe.latent_down.kernel)
        y = np.sum([weight * mlp(latent, gate_up[e], down[e]) for e, weight in weights.items()], axis=0)
        if moe.latent_norm is not None:
            y = definition.rms_norm(y, wide(moe.latent_norm), config.rms_norm_eps)
        shared = mlp(token, wide(moe.shared.gate_up.kernel), wide(moe.shared.down.kernel))
        want.append(y @ wide(moe.latent_up.kernel) + shared)
    assert_close("y", np.stack(want)[None], jax.jit(lambda x: moe(x))(x), 2e-6)
    assert 0.5 < np.std(gate_up) * 32**0.5 < 2, "drawn with the scale of plain ones"
    assert (not nnx.to_flat_state(nnx.state(moe, Packed))) == (not packed)
