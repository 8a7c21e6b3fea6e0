"""Hugging Face checkpoint -> model, one parameter at a time."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from kda_jax.config import ModelConfig
from kda_jax.model import Model
from kda_jax.weights.errors import WeightsError
from kda_jax.weights.files import TensorFiles, Tensors, read_config
from kda_jax.weights.names import canonical, fused_tensors, tensors, tied_head
from kda_jax.weights.packed import UnpackedFiles, has_packed_experts
from kda_jax.weights.parts import NUMPY_DTYPES, Parts, Source, whole_box
from kda_jax.weights.skeleton import assemble
from kda_jax.weights.table import BFLOAT16_KIND, FLOAT32_KIND, PACKED_KIND, SCALE_KIND
from kda_jax.weights.transforms import fits

STORED_DTYPES = {name: NUMPY_DTYPES[name] for name in ("F32", "BF16", "F16")}
Plan = dict[str, list[Source]]
ShardingOf = Callable[[str, jax.ShapeDtypeStruct], Sharding]


def load(
    path: str | Path,
    dtype: DTypeLike | None = None,
    *,
    unpack: bool = False,
    sharding_of: ShardingOf | None = None,
) -> Model:
    """Loads a Kimi Linear or Kimi K3 model from a folder in Hugging Face's layout.

    The model is built from shapes alone and filled parameter by parameter, each tensor read to where it stays: the
    peak of memory is the model and a small buffer; for other devices the host holds one parameter at a time. Of K3's
    checkpoints the text model is loaded; the vision tower's tensors are set aside. Shows a progress bar when stderr is
    a terminal.

    Args:
        path: folder with `config.json` and `model.safetensors`, or an index and its shards; stored as
            float32, bfloat16 or float16, routed experts also as MXFP4.
        dtype: of the parameters; None keeps the dtype of the stored embedding. `A_log`, `dt_bias` and the
            router's parameters are float32 always, and so are norms and convolutions that the files hold in float32
            beside an embedding of 16 bits.
        unpack: write MXFP4 experts out in `dtype`, as training wants them: bfloat16 and float32 hold every value.
            Otherwise they stay packed, and are unpacked one by one as tokens reach them.
        sharding_of: (path of a parameter, its shape and dtype) -> how it lies on the devices. Each process then reads
            the rows of which its own devices hold something, and no others. None puts all on the default device.

    Raises:
        WeightsError: once, with everything that is wrong with the files: tensors missing, surplus, of the
            wrong shape, or holding NaN or infinity; or what else keeps them from being read.
    """
    config = read_config(path)
    with TensorFiles(path) as stored:
        files: Tensors = stored
        if has_packed_experts(files):
            config, files = _of_packed(config, files, unpack, str(path))
        plan = match(config, files.shapes, str(path))
        dtype = _dtype(dtype, files, plan)
        with _progress(_nbytes(files, plan.values())) as (advance, reach):
            parts, done = Parts(files, config, advance), 0

            def value_of(param: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
                nonlocal done
                sources = plan[param]
                if _stays_float32(sources, files, plan):
                    shape = jax.ShapeDtypeStruct(shape.shape, jnp.float32)
                sharding = None if sharding_of is None else sharding_of(param, shape)
                value = _place(parts, sources, shape, sharding)
                done += _nbytes(files, [sources])
                reach(done)
                return value

            model = assemble(config, dtype, value_of)
    if parts.nonfinite:
        raise WeightsError(f"{path} cannot be loaded as {jnp.dtype(dtype).name}", nonfinite=parts.nonfinite)
    return model


def _nbytes(files: Tensors, sources: Iterable[list[Source]]) -> int:
    """Bytes of the tensors that fill parameters, as often as they are read."""
    return sum(
        math.prod(files.shapes[source.name]) * jnp.dtype(NUMPY_DTYPES[files.dtypes[source.name]]).itemsize
        for each in sources
        for source in each
    )


def _place(
    parts: Parts, sources: list[Source], shape: jax.ShapeDtypeStruct, sharding: Sharding | None
) -> jax.Array:
    """A parameter on its devices. What several of them hold is read once."""
    if sharding is None:
        return jax.block_until_ready(jax.device_put(parts.read(sources, shape, whole_box(shape.shape))))
    read: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        ends = tuple(cut.indices(size)[:2] for cut, size in zip(index or (), shape.shape))
        if ends not in read:
            read[ends] = parts.read(sources, shape, tuple(slice(*pair) for pair in ends))
        return read[ends]

    return jax.block_until_ready(jax.make_array_from_callback(shape.shape, sharding, part))


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


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[int], object], Callable[[int], object]]]:
    """Yields two functions for a bar of `total` bytes, told how many are new, and how many are done in all."""
    if not sys.stderr.isatty():
        yield lambda count: None, lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=total)
        yield (
            lambda count: progress.advance(task, count),
            lambda done: progress.update(task, completed=done),
        )
