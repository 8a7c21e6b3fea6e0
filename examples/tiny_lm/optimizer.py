"""Muon for matrices, AdamW for the rest, over parameters taken apart into the matrices that the formulas name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from kda_jax import ModelConfig
from tiny_lm.plan import Plan

Parts = dict[str, jax.Array]
MATRICES = "matrices "

# A layer keeps projections of one input side by side in one kernel. Muon makes each update orthogonal, which should
# hold for queries by themselves, not for queries, keys and gates as one matrix.


def part_sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """For each kernel that holds several projections: the widths of these, along its last axis."""
    heads, values = config.kda_num_heads * config.kda_head_dim, config.kda_value_heads * config.kda_value_dim
    rank = config.kda_head_dim
    gate = values if config.full_rank_gate else rank
    query = config.q_lora_rank or config.num_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    kda = (heads, heads, values, rank, gate, config.kda_value_heads)
    mla = (query, config.kv_lora_rank, config.qk_rope_head_dim)
    if config.mla_output_gate:
        mla = (*mla, config.num_heads * config.v_head_dim)
    sizes: dict[str, tuple[int, ...]] = {}
    for i, (attention, mlp) in enumerate(zip(config.layers, config.mlps)):
        sizes[f"layers.{i}.attn.in_proj.kernel"] = kda if attention == "kda" else mla
        if mlp == "dense":
            sizes[f"layers.{i}.mlp.gate_up.kernel"] = (config.intermediate_size,) * 2
        else:
            shared = config.moe_intermediate_size * config.num_shared_experts
            sizes[f"layers.{i}.mlp.w_gate_up"] = (config.moe_intermediate_size,) * 2
            sizes[f"layers.{i}.mlp.shared.gate_up.kernel"] = (shared,) * 2
    return sizes


def take_apart(params: Mapping[str, jax.Array], config: ModelConfig) -> Parts:
    """Parameters by path -> parts by path, those of a joined kernel as `path/0`, `path/1`, ..."""
    sizes = part_sizes(config)
    parts: Parts = {}
    for path, value in params.items():
        if path not in sizes:
            parts[path] = value
            continue
        if sum(sizes[path]) != value.shape[-1]:
            raise ValueError(
                f"{path} is {value.shape[-1]} wide, its parts {sizes[path]} are {sum(sizes[path])}"
            )
        start = 0
        for i, size in enumerate(sizes[path]):
            parts[f"{path}/{i}"] = value[..., start : start + size]
            start += size
    return parts


def put_together(parts: Parts, config: ModelConfig) -> dict[str, jax.Array]:
    """The inverse of `take_apart`."""
    sizes = part_sizes(config)
    params = {path: value for path, value in parts.items() if "/" not in path}
    for path, widths in sizes.items():
        if f"{path}/0" in parts:
            params[path] = jnp.concatenate([parts[f"{path}/{i}"] for i in range(len(widths))], axis=-1)
    return params


def is_matrix(path: str, value: jax.Array) -> bool:
    """Whether Muon updates this part: the maps between channels. Tables, norms, gates and taps are AdamW's."""
    table = path in ("embed", "lm_head.kernel") or path.endswith((".conv", ".dt_bias", ".router.kernel"))
    return value.ndim >= 2 and not table


def make_optimizer(plan: Plan) -> optax.GradientTransformation:
    """The optimizer of a run. It acts on parts; leading axes (experts, heads) are matrices of their own.

    Source: Jordan et al., Muon (2024); update size matched to AdamW's as in arXiv:2502.16982, section 2.2.
    """

    def dimensions(stacks: Any) -> dict[str, Any]:
        matrix = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
        return {name: matrix if name.startswith(MATRICES) else None for name in stacks}

    table = jnp.asarray([plan.rate(step) for step in range(plan.steps)], jnp.float32)

    def schedule(peak: float) -> optax.Schedule:
        return lambda count: peak * table[jnp.minimum(count, plan.steps - 1)]

    return stacked(
        muon(
            schedule(plan.muon_rate),
            weight_decay=plan.weight_decay,
            adam_b2=0.98,
            adam_learning_rate=schedule(plan.adam_rate),
            muon_weight_dimension_numbers=dimensions,
            consistent_rms=0.2,
        )
    )


def stacked(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs `inner` on stacks of parts of one shape: some ten products an iteration instead of hundreds, and a
    program that compiles in seconds instead of minutes. Its trees are Parts, where optax's types allow any."""

    def init(params: Any) -> optax.OptState:
        return inner.init(_stack(params))

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, optax.OptState]:
        if params is None:
            raise ValueError("this optimizer decays weights; give it the parameters too")
        stacks, state = inner.update(_stack(updates), state, _stack(params))
        return _unstack(cast(Parts, stacks), updates), state

    return optax.GradientTransformation(init, update)


def _stack_name(path: str, value: jax.Array) -> str:
    kind = MATRICES if is_matrix(path, value) else "others "
    return kind + "x".join(map(str, value.shape[-2:]))


def _stack(parts: Parts) -> Parts:
    stacks: dict[str, list[jax.Array]] = {}
    for path in sorted(parts):
        value = parts[path]
        flat = value.reshape(-1, *value.shape[-2:])
        stacks.setdefault(_stack_name(path, value), []).append(flat)
    return {name: jnp.concatenate(values) for name, values in stacks.items()}


def _unstack(stacks: Parts, like: Parts) -> Parts:
    parts, at = {}, dict.fromkeys(stacks, 0)
    for path in sorted(like):
        shape, name = like[path].shape, _stack_name(path, like[path])
        count = math.prod(shape[:-2])
        parts[path] = stacks[name][at[name] : at[name] + count].reshape(shape)
        at[name] += count
    return parts
