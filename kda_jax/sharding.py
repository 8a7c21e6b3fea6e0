"""How a model and its states lie on a mesh of devices: heads over the axis "tensor", experts over all devices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kda_jax.config import ModelConfig

TENSOR, EXPERT = "tensor", "expert"
EXPERTS = (EXPERT, TENSOR)
"""The axes that experts are dealt out over: all, or a mesh with few "expert" would hold each of them many times."""

_WHOLE = PartitionSpec()
_COLUMNS, _ROWS, _FIRST = PartitionSpec(None, TENSOR), PartitionSpec(TENSOR, None), PartitionSpec(TENSOR)
_OF_EXPERTS = PartitionSpec(EXPERTS)

PARAMETERS: dict[str, PartitionSpec] = {
    "embed": _COLUMNS,
    "norm": _WHOLE,
    "lm_head.kernel": _COLUMNS,
    "mix.norm": _WHOLE,
    "mix.proj": _WHOLE,
    "layers.*.input_norm": _WHOLE,
    "layers.*.post_norm": _WHOLE,
    "layers.*.attn_mix.norm": _WHOLE,
    "layers.*.attn_mix.proj": _WHOLE,
    "layers.*.mlp_mix.norm": _WHOLE,
    "layers.*.mlp_mix.proj": _WHOLE,
    # KDA, MLA
    "layers.*.attn.in_proj.kernel": _COLUMNS,
    "layers.*.attn.o_proj.kernel": _ROWS,
    # KDA
    "layers.*.attn.conv": _COLUMNS,
    "layers.*.attn.f_b.kernel": _COLUMNS,
    "layers.*.attn.g_b.kernel": _COLUMNS,
    "layers.*.attn.A_log": _FIRST,
    "layers.*.attn.dt_bias": _FIRST,
    "layers.*.attn.o_norm": _WHOLE,
    # MLA
    "layers.*.attn.q_norm": _WHOLE,
    "layers.*.attn.q_b.kernel": _COLUMNS,
    "layers.*.attn.kv_norm": _WHOLE,
    "layers.*.attn.w_uk": _FIRST,
    "layers.*.attn.w_uv": _FIRST,
    # dense and shared feed-forward
    "layers.*.mlp.gate_up.kernel": _COLUMNS,
    "layers.*.mlp.down.kernel": _ROWS,
    "layers.*.mlp.shared.gate_up.kernel": _COLUMNS,
    "layers.*.mlp.shared.down.kernel": _ROWS,
    # experts
    "layers.*.mlp.router.kernel": _WHOLE,
    "layers.*.mlp.router.bias": _WHOLE,
    "layers.*.mlp.latent_down.kernel": _COLUMNS,
    "layers.*.mlp.latent_norm": _WHOLE,
    "layers.*.mlp.latent_up.kernel": _ROWS,
    "layers.*.mlp.w_gate_up": _OF_EXPERTS,
    "layers.*.mlp.w_gate_up.packed": _OF_EXPERTS,
    "layers.*.mlp.w_gate_up.scale": _OF_EXPERTS,
    "layers.*.mlp.w_down": _OF_EXPERTS,
    "layers.*.mlp.w_down.packed": _OF_EXPERTS,
    "layers.*.mlp.w_down.scale": _OF_EXPERTS,
}
"""Where each parameter is cut, by its path with "*" for the layer's number. A path without a line is an error."""

STATE: dict[str, tuple[str | None, ...]] = {
    "recurrent": (TENSOR, None, None),  # [.., HV, K, V]
    "conv": (TENSOR,),  # [.., C]
    "latent": (),
    "position": (),
    "slots": (),
    "table": (),
}
"""Where the last axes of a state's leaf are cut, by its name. Latents are whole everywhere: all heads read them."""

AnyMesh: TypeAlias = Mesh | AbstractMesh
M = TypeVar("M", bound=nnx.Module)
S = TypeVar("S")


def partition(model: nnx.Module) -> Any:
    """The `PartitionSpec` of every parameter of a model, in the tree of `nnx.state(model)`, an `nnx.State`.

    Args:
        model: a `Model`, also one of shapes alone (`nnx.eval_shape`).

    Raises:
        ValueError: for a parameter that `PARAMETERS` does not know.
    """
    return jax.tree.map_with_path(lambda path, _: _spec(_dotted(path)), nnx.state(model))


def partition_state(state: S) -> S:
    """The `PartitionSpec` of every leaf of a `ModelState` or `PooledState`, in its tree; leaves may be shapes."""
    return jax.tree.map_with_path(lambda path, leaf: _state_spec(path, leaf.ndim), state)


def shard(model: M, mesh: AnyMesh) -> M:
    """The same model with its parameters over the devices of a mesh, and its work where they are.

    Tensor parallel over heads: a device has the heads, and the columns of dense matrices, of its place on the axis
    "tensor". Expert parallel: each expert is on one device. Norms, router and latents are on all. The states that the
    model returns lie with their heads (`partition_state`).

    Args:
        model: a `Model`; one of shapes alone comes back with shapes that have a sharding.
        mesh: with axes "tensor" and "expert", as of `jax.make_mesh((2, 4), ("tensor", "expert"))`.

    Raises:
        ValueError: if the mesh lacks an axis, or heads, experts or another size do not divide.
    """
    mesh = automatic(mesh)
    config: ModelConfig = model.config  # pyright: ignore[reportAttributeAccessIssue]
    _check(config, mesh)
    graphdef, params = nnx.split(model)
    sharded = nnx.merge(graphdef, _placed(params, partition(model), mesh))
    for _, module in nnx.iter_modules(sharded):
        if hasattr(module, "mesh"):
            module.mesh = mesh  # pyright: ignore[reportAttributeAccessIssue]
    return sharded


def shard_state(state: S, mesh: AnyMesh) -> S:
    """The same state with every leaf where a model on the mesh keeps it, also inside jit; shapes come back with a
    sharding.

    Raises:
        ValueError: if the mesh lacks an axis, or heads do not divide.
    """
    return _placed(state, partition_state(state), automatic(mesh))


def lay(x: jax.Array, mesh: AnyMesh | None, *axes: str | None) -> jax.Array:
    """x with its axes cut over those of the mesh, the last ones not named whole; x itself without a mesh."""
    return x if mesh is None else _put(x, NamedSharding(mesh, PartitionSpec(*axes)))


def over(
    mesh: AnyMesh | None, op: Callable[..., Any], ins: tuple[PartitionSpec, ...], outs: Any
) -> Callable[..., Any]:
    """The operator on each device's part of its arguments; itself without a mesh.

    XLA takes apart what is written in its own operations, if loops and merged axes do not hide the heads from it, and
    no kernel at all. So operators with either are given the parts.

    Args:
        op: of positional arguments, which may be None.
        ins: how each argument is cut.
        outs: how the results are cut; what is whole has to be made equal on all devices.
    """
    if mesh is None:
        return op
    return jax.shard_map(op, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)


def automatic(mesh: AnyMesh) -> AnyMesh:
    """The mesh with axes whose layouts XLA works out (`jax.make_mesh` may make others).

    Raises:
        ValueError: if it lacks an axis.
    """
    if lacks := {TENSOR, EXPERT} - set(mesh.axis_names):
        raise ValueError(
            f"the mesh has axes {mesh.axis_names} and lacks {sorted(lacks)}; make it with "
            'jax.make_mesh((T, E), ("tensor", "expert")), an axis may have one device'
        )
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _check(config: ModelConfig, mesh: AnyMesh) -> None:
    """Raises ValueError for heads and experts that do not divide."""
    tensor, devices = mesh.shape[TENSOR], mesh.shape[TENSOR] * mesh.shape[EXPERT]
    for name in ("kda_num_heads", "num_heads"):
        if (heads := getattr(config, name)) % tensor:
            raise ValueError(
                f"{name}={heads} is not a multiple of the mesh's {tensor=}; take a tensor axis that divides it"
            )
    if config.num_experts % devices:
        raise ValueError(
            f"num_experts={config.num_experts} is not a multiple of the mesh's {devices} devices (tensor {tensor} x "
            f"expert {mesh.shape[EXPERT]}), which share them out; take a mesh of a number that divides it"
        )


def _placed(tree: Any, specs: Any, mesh: AnyMesh) -> Any:
    """The leaves where the specs say: shapes told so, values put there, and inside jit kept there."""
    jax.tree.map_with_path(lambda path, leaf, spec: _check_axes(path, leaf, spec, mesh), tree, specs)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree)):
        return jax.tree.map(
            lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), tree, shardings
        )
    return _put(tree, shardings)


def _check_axes(path: tuple[Any, ...], leaf: Any, spec: PartitionSpec, mesh: AnyMesh) -> None:
    """Raises ValueError for an axis that does not divide."""
    for axis, names in enumerate(spec):
        ways = math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names or ()))
        if leaf.shape[axis] % ways:
            raise ValueError(
                f"{_dotted(path)} {leaf.shape}: axis {axis} does not divide over {ways} devices, those of {names!r}; "
                "take a mesh with fewer there"
            )


def _put(tree: Any, shardings: Any) -> Any:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        return jax.lax.with_sharding_constraint(tree, shardings)
    return jax.device_put(tree, shardings)


def _spec(path: str) -> PartitionSpec:
    spec = PARAMETERS.get(re.sub(r"(?<=^layers\.)\d+", "*", path))
    if spec is None:
        raise ValueError(
            f"{path} is no parameter of a model that can be sharded: PARAMETERS has no line for it"
        )
    return spec


def _state_spec(path: tuple[Any, ...], ndim: int) -> PartitionSpec:
    last = STATE[path[-1].name]
    return PartitionSpec(*(None,) * (ndim - len(last)), *last) if last else PartitionSpec()


def _dotted(path: tuple[Any, ...]) -> str:
    """A path of jax's as `layers.0.attn.conv`: without the attribute by which a variable holds its value."""
    names = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path)
    return ".".join(str(name) for name in names if name != "value")
