"""Names and shapes of a checkpoint's tensors, and the places in our parameters that they fill."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from kda_jax.config import ModelConfig
from kda_jax.weights.table import (
    BFLOAT16_KIND,
    DENSE,
    EXPERT,
    FLOAT32_KIND,
    KDA,
    KDA_FUSED,
    LAYER,
    MLA,
    MOE,
    MOE_FUSED,
    PACKED_KIND,
    SCALE_KIND,
    TOP,
    Row,
)
from pallas_kernels.mxfp4 import BLOCK

PREFIX_OF_MULTIMODAL = "language_model."
NOT_TEXT = ("vision_tower.", "mm_projector.")
A_LOG_PADDING = 128


class Target(NamedTuple):
    """The part of one of our parameters that a tensor fills: `parameter[expert][..., start:stop]`, or with `by_rows`
    `parameter[expert][start:stop]`."""

    path: str
    expert: int | None
    start: int
    stop: int | None
    by_rows: bool = False

    def box(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """That part as slices of a parameter of this shape; the expert's axis stays, of length 1."""
        box = [slice(0, size) for size in shape]
        if self.expert is not None:
            box[0] = slice(self.expert, self.expert + 1)
        if self.stop is not None:
            box[-2 if self.by_rows else -1] = slice(self.start, self.stop)
        return tuple(box)

    def of(self, parameter: np.ndarray) -> np.ndarray:
        """A view of that part."""
        part = parameter if self.expert is None else parameter[self.expert]
        return part[self.start : self.stop] if self.by_rows else part[..., self.start : self.stop]


class Tensor(NamedTuple):
    """One tensor of a checkpoint of a given config, with the places it fills."""

    name: str
    shape: tuple[int, ...]
    kind: str
    transform: str
    targets: tuple[Target, ...]


def sizes(config: ModelConfig) -> dict[str, int]:
    """The axis names of the table, for one config (channels, heads, experts or taps)."""
    c = config
    heads, gate_heads = c.kda_num_heads, c.kda_value_heads
    key, value = c.kda_head_dim, c.kda_value_dim
    inner, latent = c.moe_intermediate_size, c.routed_expert_hidden_size or c.hidden_size
    return {
        **{"1": 1, "D": c.hidden_size, "F": c.intermediate_size, "vocab": c.vocab_size, "W": c.conv_size},
        **{"K": key, "V": value, "G": gate_heads, "Gpad": -(-gate_heads // A_LOG_PADDING) * A_LOG_PADDING},
        **{"HK": heads * key, "GK": gate_heads * key, "GV": gate_heads * value, "C": c.conv_channels},
        **{"R": c.kv_lora_rank, "RP": c.latent_size, "Rq": c.q_lora_rank or 0},
        "Hq": c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim),
        "Hkv": c.num_heads * (c.qk_nope_head_dim + c.v_head_dim),
        "Hv": c.num_heads * c.v_head_dim,
        **{"E": c.num_experts, "I": inner, "I2": 2 * inner, "Is": inner * c.num_shared_experts, "Z": latent},
        **{
            "I/2": inner // 2,
            "I/32": inner // BLOCK,
            "Z/2": latent // 2,
            "Z/32": latent // BLOCK,
        },
    }


def conditions(config: ModelConfig) -> dict[str, bool]:
    """What the rows' `when` may ask, answered for one config."""
    k3 = is_multimodal(config)
    return {
        "always": True,
        "full_rank_gate": config.full_rank_gate,
        "low_rank_gate": not config.full_rank_gate,
        "padded_heads": k3,
        "plain_heads": not k3,
        "low_rank_query": config.q_lora_rank is not None,
        "full_rank_query": config.q_lora_rank is None,
        "mla_gate": config.mla_output_gate,
        "shared": config.num_shared_experts > 0,
        "attn_res": config.attn_res_block_size is not None,
        "latent_experts": config.routed_expert_hidden_size is not None,
        "latent_norm": config.routed_expert_hidden_size is not None and config.latent_moe_norm,
        "plain_experts": config.quantization is None,
        "mxfp4": config.quantization == "mxfp4",
        "untied": not config.tie_embeddings,
    }


def is_multimodal(config: ModelConfig) -> bool:
    """Whether its checkpoints are K3's: names under `language_model.`, `A_log` padded with zeros."""
    return config.to_hf()["model_type"] == "kimi_k3"


class _Axes(NamedTuple):
    size_of: dict[str, int]
    holds: dict[str, bool]

    @classmethod
    def of(cls, config: ModelConfig) -> _Axes:
        return cls(sizes(config), conditions(config))


def _place(rows: tuple[Row, ...], axes: _Axes, layer: int | None = None) -> Iterator[Tensor]:
    scope, path_scope = ("", "") if layer is None else (f"model.layers.{layer}.", f"layers.{layer}.")
    filled: dict[str, int] = {}
    for row in rows:
        if not axes.holds[row.when]:
            continue
        shape = tuple(axes.size_of[axis] for axis in row.shape.split())
        targets = tuple(Target(path_scope + path, None, 0, None) for path in row.paths.split())
        if row.transform in ("matrix", "conv", "rows"):
            start = filled.get(row.paths, 0)
            stop = filled[row.paths] = start + shape[0]
            targets = (targets[0]._replace(start=start, stop=stop, by_rows=row.transform == "rows"),)
        yield Tensor(scope + row.name, shape, row.kind, row.transform, targets)


def _layer_rows(config: ModelConfig, layer: int) -> tuple[Row, ...]:
    kinds = LAYER + (KDA if config.layers[layer] == "kda" else MLA)
    return kinds + (DENSE if config.mlps[layer] == "dense" else MOE)


def _for_expert(tensor: Tensor, expert: int) -> Tensor:
    targets = tuple(target._replace(expert=expert) for target in tensor.targets)
    return tensor._replace(name=tensor.name.replace("{e}", str(expert)), targets=targets)


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of a checkpoint of this config, in the order of the layers.

    Yields:
        Tensors under the names of the released checkpoints, without the `language_model.` prefix.
    """
    axes = _Axes.of(config)
    yield from _place(TOP, axes)
    for layer, mlp in enumerate(config.mlps):
        yield from _place(_layer_rows(config, layer), axes, layer)
        of_expert = list(_place(EXPERT, axes, layer))
        for expert in range(config.num_experts if mlp == "moe" else 0):
            yield from (_for_expert(tensor, expert) for tensor in of_expert)


def fused_tensors(config: ModelConfig) -> Iterator[Tensor]:
    """The tensors that may stand in for several of `tensors`: transformers' own layout in memory."""
    axes = _Axes.of(config)
    for layer, (kind, mlp) in enumerate(zip(config.layers, config.mlps)):
        rows = (KDA_FUSED if kind == "kda" else ()) + (MOE_FUSED if mlp == "moe" else ())
        yield from _place(rows, axes, layer)


def tied_head(config: ModelConfig) -> Tensor | None:
    """The copy of a tied embedding that may stand in a checkpoint; None where the head has its own weights.

    transformers does not tie Kimi Linear's head, whatever its config says: it reads this tensor, or draws one.
    """
    if not config.tie_embeddings:
        return None
    (row,) = (row for row in TOP if row.paths == "embed")
    (tensor,) = _place((row,), _Axes.of(config))
    return tensor._replace(name="lm_head.weight")


def hf_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, kind) of every tensor of a released text checkpoint; nothing is allocated.

    Returns:
        Kinds are "bf16", "f32", "mxfp4" (packed experts: uint8, two values a byte) and "e8m0" (their scales).
    """
    axes = _Axes.of(config)
    prefix = PREFIX_OF_MULTIMODAL if is_multimodal(config) else ""
    shapes = {prefix + tensor.name: (tensor.shape, tensor.kind) for tensor in _place(TOP, axes)}
    for layer, mlp in enumerate(config.mlps):
        for tensor in _place(_layer_rows(config, layer), axes, layer):
            shapes[prefix + tensor.name] = (tensor.shape, tensor.kind)
        for tensor in _place(EXPERT, axes, layer):
            before, _, after = (prefix + tensor.name).partition("{e}")
            row = (tensor.shape, tensor.kind)
            for expert in range(config.num_experts if mlp == "moe" else 0):
                shapes[f"{before}{expert}{after}"] = row
    return shapes


_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(mlp|block_sparse_moe)\.")


def canonical(name: str, config: ModelConfig) -> str | None:
    """The table's name of a tensor that a file calls `name`; None for tensors of the vision tower.

    Undoes what writers do differently: the `language_model.` prefix of K3; `mlp` against `block_sparse_moe`
    (transformers writes dense layers under the second, and holds both kinds under the first); and
    `self_attn.forget_gate.*`, its own module for the gate.
    """
    if name.startswith(NOT_TEXT):
        return None
    name = name.removeprefix(PREFIX_OF_MULTIMODAL).replace(".self_attn.forget_gate.", ".self_attn.")
    match = _LAYER_NAME.match(name)
    if match and int(match[1]) < len(config.mlps):
        branch = "mlp" if config.mlps[int(match[1])] == "dense" else "block_sparse_moe"
        name = f"model.layers.{match[1]}.{branch}.{name[match.end() :]}"
    return name


def parameters_and_nbytes(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[int, int]:
    """Counts the parameters and the stored bytes of some tensors of `hf_shapes`; scales are bytes only."""
    parameters = nbytes = 0
    for shape, kind in shapes.values():
        count = math.prod(shape)
        parameters += count * {PACKED_KIND: 2, SCALE_KIND: 0}.get(kind, 1)
        nbytes += count * {FLOAT32_KIND: 4, BFLOAT16_KIND: 2}.get(kind, 1)
    return parameters, nbytes
