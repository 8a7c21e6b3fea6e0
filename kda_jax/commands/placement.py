"""What each device of a mesh holds of a model, and how many sequences find room beside it: from shapes alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh
from rich.table import Table

from kda_jax.commands.devices import Device, MeshShape
from kda_jax.commands.sizes import CONTEXTS, EMBEDDING, ORDER, ROUTED, leaf_bytes, part_of, state_bytes
from kda_jax.commands.tables import binary, table
from kda_jax.config import ModelConfig
from kda_jax.model import Model
from kda_jax.sharding import EXPERT, TENSOR, shard
from kda_jax.weights.skeleton import outline

NODE = 8
"""Devices that the heads are shared out over, where a mesh is ours to choose: those of one machine."""
MOST = 1024
# the first of these that stands in a parameter's path says which part it belongs to
_PARTS = (
    (".mlp.router.", "router"),
    (".mlp.shared.", "shared experts"),
    (".mlp.latent_", "expert latents"),
    (".mlp.w_", ROUTED),
    (".mlp.", "dense feed-forward"),
    (".attn.", "attention"),
    ("embed", EMBEDDING),
    ("lm_head.", "head"),
    ("", "norms and residual mixing"),
)


def describe(config: ModelConfig, shape: MeshShape, device: Device | None) -> dict[str, Any]:
    """The figures of one mesh as plain json.

    Raises:
        ValueError: heads, experts or another size do not divide over the mesh.
    """
    return _on(outline(config, jnp.bfloat16), config, shape, device)


def describe_counts(config: ModelConfig, device: Device) -> list[dict[str, Any]]:
    """The figures of 1, 2, 4, .. devices, as long as the model divides over them."""
    model, found = outline(config, jnp.bfloat16), []
    count = 1
    while count <= MOST:
        heads = min(count, NODE)
        try:
            found.append(_on(model, config, MeshShape(heads, count // heads), device))
        except ValueError:
            break
        count *= 2
    return found


def _on(model: Model, config: ModelConfig, shape: MeshShape, device: Device | None) -> dict[str, Any]:
    mesh = AbstractMesh((shape.tensor, shape.expert), (TENSOR, EXPERT))
    parts = dict.fromkeys(ORDER, 0)
    for path, param in nnx.to_flat_state(nnx.state(shard(model, mesh))):
        parts[part_of(config, ".".join(map(str, path)), _PARTS)] += leaf_bytes(param.get_value())
    state, total = state_bytes(config, mesh=mesh), sum(parts.values())
    figures: dict[str, Any] = {
        "mesh": str(shape),
        "devices": shape.count,
        "parameter_bytes": {"total": total, "parts": {part: held for part, held in parts.items() if held}},
        "state_bytes": {
            str(tokens): {"state": state.at(tokens), "latents": tokens * state.latent_per_token}
            for tokens in CONTEXTS
        },
    }
    if device is not None:
        room = device.memory_bytes - total
        figures |= {
            "device": device.product,
            "memory_bytes": device.memory_bytes,
            "fits": room >= 0,
            "sequences": {str(tokens): max(0, room) // state.at(tokens) for tokens in CONTEXTS},
        }
    return figures


def tables(figures: dict[str, Any]) -> tuple[Table, Table]:
    """What `describe` found, to be printed."""
    product, total = figures.get("device", "device"), figures["parameter_bytes"]["total"]
    held = table(f"On each {product} of a mesh {figures['mesh']}", "part", "bytes", "")
    for part, nbytes in figures["parameter_bytes"]["parts"].items():
        held.add_row(part, f"{nbytes:,}", binary(nbytes))
    held.add_section()
    held.add_row("parameters", f"{total:,}", binary(total))
    if "device" in figures:
        memory = figures["memory_bytes"]
        held.add_row("memory", f"{memory:,}", binary(memory))
        if not figures["fits"]:
            held.add_row("[bold]does not fit, lacks[/bold]", f"{total - memory:,}", binary(total - memory))
    columns = ("tokens", "state", "of it latents", *(["sequences that fit"] if "device" in figures else []))
    states = table("State of one sequence, on each of these", *columns)
    for tokens, row in figures["state_bytes"].items():
        fit = [f"{figures['sequences'][tokens]:,}"] if "device" in figures else []
        states.add_row(f"{int(tokens):,}", binary(row["state"]), binary(row["latents"]), *fit)
    return held, states


def table_of_counts(found: list[dict[str, Any]]) -> Table:
    """What `describe_counts` found, to be printed."""
    memory = found[0]["memory_bytes"]
    made = table(
        f"What fits on {found[0]['device']}, {binary(memory)} each",
        *("devices", "mesh", "parameters on each"),
        *(f"sequences of {int(tokens):,}" for tokens in found[0]["sequences"]),
    )
    for row in found:
        fit = (f"{count:,}" for count in row["sequences"].values()) if row["fits"] else ("-",) * len(CONTEXTS)
        made.add_row(str(row["devices"]), row["mesh"], binary(row["parameter_bytes"]["total"]), *fit)
    return made


EXPLAINED = (
    "A mesh TxE: heads over T devices, experts over all T x E, latents whole on each. Parameters in bfloat16, MXFP4 "
    "experts as they are. What a program needs while it runs is not counted: `compile` asks the compiler for it."
)
