"""How one tensor of a checkpoint becomes our parameters, and back: views where numpy allows it, no copies.

PyTorch's linear layers hold [out, in] and ours [in, out]; the rest is reshaping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kda_jax.config import ModelConfig

Arrays = tuple[np.ndarray, ...]


class Transform(NamedTuple):
    """Both ways between a tensor and the parameters it fills.

    Attributes:
        to_ours: (tensor, or some of its rows, config) -> one array for each target.
        from_ours: (arrays, shape of the tensor, config) -> tensor.
        rows_axis: axis of those arrays along which the tensor's rows lie, so that some rows make some of it; None for
            small tensors that are taken whole.
        columns_axis: the same of the columns of a tensor of two axes.
    """

    to_ours: Callable[[np.ndarray, ModelConfig], Arrays]
    from_ours: Callable[[Arrays, tuple[int, ...], ModelConfig], np.ndarray]
    rows_axis: int | None = None
    columns_axis: int | None = None

    @property
    def is_identity(self) -> bool:
        """Whether a tensor of one or two axes is the array that it makes."""
        return (self.rows_axis, self.columns_axis) == (0, 1)


def _heads_from(arrays: Arrays, shape: tuple[int, ...], config: ModelConfig) -> np.ndarray:
    (heads,) = arrays
    padded = np.zeros(np.prod(shape), heads.dtype)
    padded[: heads.size] = heads
    return padded.reshape(shape)


def _split_key_and_value_heads(tensor: np.ndarray, config: ModelConfig) -> Arrays:
    nope = config.qk_nope_head_dim
    heads = tensor.reshape(-1, nope + config.v_head_dim, config.kv_lora_rank)
    return heads[:, :nope], heads[:, nope:].transpose(0, 2, 1)


def _join_key_and_value_heads(arrays: Arrays, shape: tuple[int, ...], config: ModelConfig) -> np.ndarray:
    keys, values = arrays
    return np.concatenate([keys, values.transpose(0, 2, 1)], axis=1).reshape(shape)


TRANSFORMS: dict[str, Transform] = {
    "same": Transform(lambda x, config: (x,), lambda arrays, shape, config: arrays[0], 0, 1),
    # packed experts keep PyTorch's [out, in]
    "rows": Transform(lambda x, config: (x,), lambda arrays, shape, config: arrays[0], 0, 1),
    "matrix": Transform(lambda x, config: (x.T,), lambda arrays, shape, config: arrays[0].T, 1, 0),
    # [C, 1, W] <-> [W, C]
    "conv": Transform(lambda x, config: (x[:, 0].T,), lambda arrays, shape, config: arrays[0].T[:, None], 1),
    # [E, out, in] <-> [E, in, out]
    "stacked": Transform(
        lambda x, config: (x.transpose(0, 2, 1),),
        lambda arrays, shape, config: arrays[0].transpose(0, 2, 1),
        0,
    ),
    # A_log: [HV], [1, 1, HV, 1] or padded with zeros <-> [HV]
    "heads": Transform(lambda x, config: (x.reshape(-1)[: config.kda_value_heads],), _heads_from),
    # dt_bias: [HV*K] <-> [HV, K]
    "head_channels": Transform(
        lambda x, config: (x.reshape(config.kda_value_heads, config.kda_head_dim),),
        lambda arrays, shape, config: arrays[0].reshape(shape),
    ),
    # kv_b_proj: rows of a head are its keys, then its values; [H*(N+v), R] <-> w_uk [H, N, R], w_uv [H, R, v]
    "key_and_value_heads": Transform(_split_key_and_value_heads, _join_key_and_value_heads, 0),
}


def fits(transform: str, shape: tuple[int, ...], expected: tuple[int, ...], config: ModelConfig) -> bool:
    """Whether a tensor of this shape can fill its place: exactly `expected`, but for the forms of `A_log`."""
    if transform != "heads":
        return shape == expected
    heads = config.kda_value_heads
    return shape == (1, 1, heads, 1) or (len(shape) == 1 and shape[0] >= heads)


def padding(transform: str, tensor: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The values of a tensor that fill no parameter; a sound file holds zeros there."""
    return tensor.reshape(-1)[config.kda_value_heads :] if transform == "heads" else tensor[:0]
