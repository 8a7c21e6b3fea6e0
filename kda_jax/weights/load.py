"""Hugging Face checkpoint -> model, one parameter at a time."""

from __future__ import annotations

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
from kda_jax.weights.files import TensorFiles, read_config
from kda_jax.weights.names import Target, Tensor, canonical, fused_tensors, tensors, tied_head
from kda_jax.weights.skeleton import assemble, shapes
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


def load(path: str | Path, dtype: DTypeLike | None = None) -> Model:
    """Loads a Kimi Linear model from a folder in Hugging Face's layout.

    The model is built from shapes alone and filled parameter by parameter: the peak of host memory is the
    model plus its largest parameter. Shows a progress bar when stderr is a terminal.

    Args:
        path: folder with `config.json` and `model.safetensors`, or an index and its shards; stored as
            float32, bfloat16 or float16.
        dtype: of the parameters; None keeps the dtype of the stored embedding. `A_log`, `dt_bias` and the
            router's parameters are float32 always.

    Raises:
        WeightsError: once, with everything that is wrong with the files: tensors missing, surplus, of the
            wrong shape, or holding NaN or infinity; or what else keeps them from being read.
        NotImplementedError: if the config is of a model that this version cannot build.
    """
    config = read_config(path)
    if config.k3_parts:
        shapes(config)  # `Model` says what it cannot build, before its files are looked at
    files = TensorFiles(path)
    plan = match(config, files.shapes, str(path))
    dtype = _dtype(dtype, files, plan)
    nonfinite: list[str] = []
    with _progress(len(plan)) as advance:

        def value_of(param: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
            value = _fill(plan[param], files, config, shape, nonfinite)
            advance()
            return value

        model = assemble(config, dtype, value_of)
    if nonfinite:
        raise WeightsError(f"{path} cannot be loaded as {jnp.dtype(dtype).name}", nonfinite=nonfinite)
    return model


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


def _dtype(asked: DTypeLike | None, files: TensorFiles, plan: Plan) -> DTypeLike:
    strange = sorted({name for name, dtype in files.dtypes.items() if dtype not in STORED_DTYPES})
    used = {source.name for sources in plan.values() for source in sources}
    if strange := [name for name in strange if name in used]:
        raise WeightsError(
            f"{strange[0]} is stored as {files.dtypes[strange[0]]} (and so {len(strange) - 1} more); "
            f"{', '.join(STORED_DTYPES)} can be read"
        )
    if asked is None:
        return STORED_DTYPES[files.dtypes[plan["embed"][0].name]]
    if jnp.dtype(asked) not in map(jnp.dtype, STORED_DTYPES.values()):
        raise ValueError(f"dtype={jnp.dtype(asked).name} is not one of float32, bfloat16, float16")
    return asked


def _fill(
    sources: list[Source],
    files: TensorFiles,
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
        place = values if target.expert is None else values[target.expert]
        place = place[..., target.start : target.stop]
        with np.errstate(over="ignore"):  # what overflows is found below
            value = TRANSFORMS[tensor.transform].to_ours(stored, config)[which]
            if target not in filled:
                place[...] = value
            elif not np.array_equal(place, value.astype(place.dtype)):
                raise WeightsError(f"{name} differs from the embedding that the config ties it to")
        filled.add(target)
        beyond = padding(tensor.transform, stored, config)
        if not _finite(place) or not _finite(beyond):
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


def _finite(values: np.ndarray) -> bool:
    """Whether no exponent is all ones, looked up in the bits: numpy has no fast test for bfloat16."""
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
