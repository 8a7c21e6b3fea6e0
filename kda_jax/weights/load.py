"""Hugging Face checkpoint -> model, one parameter at a time."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kda_jax.config import ModelConfig
from kda_jax.model import Model
from kda_jax.weights.errors import WeightsError
from kda_jax.weights.files import TensorFiles, Tensors, read_config
from kda_jax.weights.names import Target, Tensor, canonical, fused_tensors, tensors, tied_head
from kda_jax.weights.packed import UnpackedFiles, has_packed_experts
from kda_jax.weights.skeleton import assemble
from kda_jax.weights.table import BFLOAT16_KIND, FLOAT32_KIND, PACKED_KIND, SCALE_KIND
from kda_jax.weights.transforms import TRANSFORMS, fits, padding

STORED_DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}
_CHECKED_AT_ONCE = 1 << 20
_ALIGNMENT = 64  # bytes


class Source(NamedTuple):
    """A tensor in the files, and which of its targets is meant."""

    name: str
    tensor: Tensor
    which: int


Plan = dict[str, list[Source]]


def load(path: str | Path, dtype: DTypeLike | None = None, *, unpack: bool = False) -> Model:
    """Loads a Kimi Linear or Kimi K3 model from a folder in Hugging Face's layout.

    The model is built from shapes alone and filled parameter by parameter, each tensor read when its place is made:
    the peak of host memory is the model plus its largest parameter. Of K3's checkpoints the text model is loaded; the
    vision tower's tensors are set aside. Shows a progress bar when stderr is a terminal.

    Args:
        path: folder with `config.json` and `model.safetensors`, or an index and its shards; stored as
            float32, bfloat16 or float16, routed experts also as MXFP4.
        dtype: of the parameters; None keeps the dtype of the stored embedding. `A_log`, `dt_bias` and the
            router's parameters are float32 always, and so are norms and convolutions that the files hold in float32
            beside an embedding of 16 bits.
        unpack: write MXFP4 experts out in `dtype`, as training wants them: bfloat16 and float32 hold every value.
            Otherwise they stay packed, and are unpacked one by one as tokens reach them.

    Raises:
        WeightsError: once, with everything that is wrong with the files: tensors missing, surplus, of the
            wrong shape, or holding NaN or infinity; or what else keeps them from being read.
    """
    config, files = read_config(path), TensorFiles(path)
    if has_packed_experts(files):
        config, files = _of_packed(config, files, unpack, str(path))
    plan = match(config, files.shapes, str(path))
    dtype = _dtype(dtype, files, plan)
    nonfinite: list[str] = []
    with _progress(len(plan)) as advance:

        def value_of(param: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
            if _stays_float32(plan[param], files, plan):
                shape = jax.ShapeDtypeStruct(shape.shape, jnp.float32)
            value = _fill(plan[param], files, config, shape, nonfinite)
            advance()
            return value

        model = assemble(config, dtype, value_of)
    if nonfinite:
        raise WeightsError(f"{path} cannot be loaded as {jnp.dtype(dtype).name}", nonfinite=nonfinite)
    return model


def _of_packed(config: ModelConfig, files: Tensors, unpack: bool, where: str) -> tuple[ModelConfig, Tensors]:
    """The config and the tensors of a model with packed experts, whether its config knew of them or not."""
    if unpack:
        return dataclasses.replace(config, quantization=None), UnpackedFiles(files)
    try:
        return dataclasses.replace(config, quantization="mxfp4"), files
    except ValueError as error:
        raise WeightsError(f"{where}: {error}") from None


def match(config: ModelConfig, found: dict[str, tuple[int, ...]], where: str = "checkpoint") -> Plan:
    """Assigns the tensors of a checkpoint to parameters.

    Args:
        config: the checkpoint's config.
        found: name -> shape of every tensor in its files.
        where: what the error calls the checkpoint.

    Returns:
        Path of each parameter -> the tensors that fill it.

    Raises:
        WeightsError: with every tensor that is missing, surplus or of the wrong shape.
    """
    named: dict[str, str] = {}
    surplus = []
    for name in found:
        known = canonical(name, config)
        if known in named:
            surplus.append(f"{name} (the same as {named[known]})")
        elif known is not None:
            named[known] = name
    wanted = list(tensors(config))
    fused = [tensor for tensor in fused_tensors(config) if tensor.name in named]
    replaced = {tensor.targets[0].path for tensor in fused}
    wanted = [
        tensor for tensor in wanted if not replaced & {target.path for target in tensor.targets}
    ] + fused
    copy = tied_head(config)
    if copy is not None and copy.name in named:
        wanted.append(copy)

    plan: Plan = {}
    missing, misshaped = [], []
    for tensor in wanted:
        name = named.pop(tensor.name, None)
        if name is None:
            missing.append(tensor.name)
        elif not fits(tensor.transform, found[name], tensor.shape, config):
            misshaped.append(f"{name}: shape {list(found[name])}, expected {list(tensor.shape)}")
        else:
            for which, target in enumerate(tensor.targets):
                plan.setdefault(target.path, []).append(Source(name, tensor, which))
    surplus += named.values()
    if missing or surplus or misshaped:
        raise WeightsError(
            f"{where} does not fit its config", missing=missing, surplus=sorted(surplus), misshaped=misshaped
        )
    return plan


def _dtype(asked: DTypeLike | None, files: Tensors, plan: Plan) -> DTypeLike:
    for kinds, readable in (
        ((PACKED_KIND, SCALE_KIND), ("U8",)),
        ((BFLOAT16_KIND, FLOAT32_KIND), STORED_DTYPES),
    ):
        used = {source.name for sources in plan.values() for source in sources if source.tensor.kind in kinds}
        if strange := sorted(name for name in used if files.dtypes[name] not in readable):
            raise WeightsError(
                f"{strange[0]} is stored as {files.dtypes[strange[0]]} (and so {len(strange) - 1} more); "
                f"{', '.join(readable)} can be read"
            )
    if asked is None:
        return STORED_DTYPES[files.dtypes[plan["embed"][0].name]]
    if jnp.dtype(asked) not in map(jnp.dtype, STORED_DTYPES.values()):
        raise ValueError(f"dtype={jnp.dtype(asked).name} is not one of float32, bfloat16, float16")
    return asked


def _stays_float32(sources: list[Source], files: Tensors, plan: Plan) -> bool:
    """Whether these small tensors are in float32 on purpose: beside an embedding that is not."""
    if files.dtypes[plan["embed"][0].name] == "F32":
        return False
    return all(s.tensor.transform in ("same", "conv") and files.dtypes[s.name] == "F32" for s in sources)


def _fill(
    sources: list[Source],
    files: Tensors,
    config: ModelConfig,
    shape: jax.ShapeDtypeStruct,
    nonfinite: list[str],
) -> jax.Array:
    values = _aligned(shape.shape, np.dtype(shape.dtype))
    by_name = {source.name: source for source in sources}
    filled: set[Target] = set()
    for name, stored in files.read(by_name):
        _, tensor, which = by_name[name]
        target = tensor.targets[which]
        place = target.of(values)
        with np.errstate(over="ignore"):  # what overflows is found below
            value = TRANSFORMS[tensor.transform].to_ours(stored, config)[which]
            if target not in filled:
                place[...] = value
            elif not np.array_equal(place, value.astype(place.dtype)):
                raise WeightsError(f"{name} differs from the embedding that the config ties it to")
        filled.add(target)
        beyond = padding(tensor.transform, stored, config)
        if not _finite(place, tensor.kind) or not _finite(beyond, tensor.kind):
            nonfinite.append(name)
        elif beyond.any():
            raise WeightsError(
                f"{name}: shape {list(stored.shape)} for {config.kda_value_heads} heads, but the values "
                "beyond them are not zeros"
            )
        del stored, value
    return jax.block_until_ready(jax.device_put(values))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without values at an address from which XLA's CPU client takes it over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def _finite(values: np.ndarray, stored: str) -> bool:
    """Whether no exponent is all ones, looked up in the bits: numpy has no fast test for bfloat16."""
    if stored in (PACKED_KIND, SCALE_KIND):
        return stored == PACKED_KIND or not (values == 255).any()
    kind = jnp.finfo(values.dtype)
    mask = np.array(((1 << kind.nexp) - 1) << kind.nmant, f"u{values.dtype.itemsize}")
    rows = max(1, _CHECKED_AT_ONCE // max(1, values[:1].size))
    bits = values.view(mask.dtype)
    return not any((bits[i : i + rows] & mask == mask).any() for i in range(0, len(bits), rows))


@contextmanager
def _progress(total: int) -> Iterator:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("loading", total=total)
        yield lambda: progress.advance(task)
