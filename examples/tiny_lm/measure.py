"""Bits per byte of a model on whole files, beside what xz and bzip2 need for the same bytes."""

from __future__ import annotations

import bz2
import lzma
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import Model, prefill, split
from tiny_lm.batches import document
from tiny_lm.corpus import Source

PIECE = 2048
BANDS = (0, 256, 1024, 4096, 16384, 65536)

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "xz -9": partial(lzma.compress, preset=9),
    "xz -9e": partial(lzma.compress, preset=9 | lzma.PRESET_EXTREME),
    "bz2 -9": partial(bz2.compress, compresslevel=9),
}


class FileBits(NamedTuple):
    """What the model needs for one file: `bits[i]` for byte i, and last for the end of the file; float64."""

    name: str
    bits: np.ndarray


def compressed(sources: Sequence[Source]) -> dict[str, dict[str, float]]:
    """Bits per byte of each compressor: `concatenated` (all files in one stream) and `per_file` (each by itself).

    One stream is the harder bar: the compressor may copy from every file before, the model starts each file empty.
    """
    total = sum(len(source.data) for source in sources)
    joined = b"".join(source.data for source in sources)
    return {
        name: {
            "concatenated": 8 * len(compress(joined)) / total,
            "per_file": 8 * sum(len(compress(source.data)) for source in sources) / total,
        }
        for name, compress in COMPRESSORS.items()
    }


@jax.jit
def _target_bits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen) / jnp.log(2.0)


def file_bits(model: Model, source: Source) -> FileBits:
    """Reads one file from an empty state to its end, in pieces that hand the state on.

    The first byte is predicted from BOS, and the end of the file is paid for too, so that the sum is the length of a
    code that can be decoded.
    """
    tokens = document(source.data).astype(np.int32)
    # Few capacities, so that few programs are compiled.
    capacity = PIECE
    while capacity < len(tokens):
        capacity *= 4
    parts, state, found = split(model), None, []
    for start in range(0, len(tokens) - 1, PIECE):
        targets = tokens[start + 1 : start + PIECE + 1]
        inputs = np.zeros((1, PIECE), np.int32)
        inputs[0, : len(targets)] = tokens[start : start + len(targets)]
        lengths = [len(targets)]
        logits, state = prefill(parts, inputs, state, lengths, capacity=capacity)
        padded = np.zeros((1, PIECE), np.int32)
        padded[0, : len(targets)] = targets
        found.append(np.asarray(_target_bits(logits, jnp.asarray(padded)), np.float64)[0, : len(targets)])
    return FileBits(source.name, np.concatenate(found))


def summary(files: Sequence[FileBits]) -> dict[str, Any]:
    """Bits per byte over all files, by distance from the file's start, and of each file."""
    total = sum(len(file.bits) - 1 for file in files)
    bands = {}
    for low, high in zip(BANDS, (*BANDS[1:], 1 << 40)):
        band = np.concatenate([file.bits[low:high] for file in files])
        if len(band):
            bands[f"from {low}"] = {"bytes": len(band), "bits_per_byte": float(band.mean())}
    return {
        "bits_per_byte": float(sum(file.bits.sum() for file in files) / total),
        "bytes": total,
        "by_position": bands,
        "files": {
            file.name: {
                "bytes": len(file.bits) - 1,
                "bits_per_byte": float(file.bits.sum() / (len(file.bits) - 1)),
            }
            for file in files
        },
    }
