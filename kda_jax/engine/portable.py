"""Pages of the pool as what slower tiers keep: the leaves and pages of `checkpoint.cut`, in arrays of numpy.

Runs on threads beside the engine's, on copies: numpy only, so that no program is compiled and the device is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cache.payload import Payload
from kda_jax.engine.memory import Layout

Leaves = dict[str, np.ndarray]


class SlotState(NamedTuple):
    """A state on its way into a slot.

    Attributes:
        recurrent: a KDA layer each, float32 [1, HV, K, V].
        conv: a KDA layer each, [1, W-1, C] in the model's dtype.
        tail: rows of the unfinished page, [planes, R, L] in the pool's dtype with zeros behind them; None without any.
    """

    recurrent: tuple[np.ndarray, ...]
    conv: tuple[np.ndarray, ...]
    tail: np.ndarray | None


class Portable:
    """Both ways, for one layout of the memory."""

    def __init__(self, layout: Layout) -> None:
        config = layout.config
        self._layout = layout
        self._kda = [i for i, kind in enumerate(config.layers) if kind == "kda"]
        self._mla = [i for i, kind in enumerate(config.layers) if kind == "mla"]
        self._recurrent = (1, config.kda_value_heads, config.kda_head_dim, config.kda_value_dim)
        self._conv = (1, config.conv_size - 1, config.conv_channels)

    def state(self, boundary: int, pages: np.ndarray) -> Leaves:
        """The leaves of a snapshot at `boundary`, from its pages [k or k + 1, planes, R, L] as the pool has them."""
        layout, leaves = self._layout, {}
        vector, at = np.ascontiguousarray(pages[: layout.state_pages]).reshape(-1), 0
        parts = 4 // layout.dtype.itemsize
        for i in self._kda:
            size = parts * int(np.prod(self._recurrent))
            bits = vector[at : at + size].view(np.float32)
            leaves[f"layers.{i}.recurrent"] = bits.reshape(self._recurrent).copy()
            at += size
        for i in self._kda:
            size = int(np.prod(self._conv))
            window = vector[at : at + size].astype(layout.window_dtype)
            leaves[f"layers.{i}.conv"] = window.reshape(self._conv)
            at += size
        inside = boundary % layout.page_rows
        last = pages[-1] if inside else np.zeros(self._page_shape, layout.dtype)
        for plane, i in enumerate(self._mla):
            leaves[f"layers.{i}.latent"] = last[None, plane, :inside].astype(layout.window_dtype)
        for i in (*self._kda, *self._mla):
            leaves[f"layers.{i}.position"] = np.full((1,), boundary, np.int32)
        return leaves

    def page(self, page: np.ndarray) -> Leaves:
        """The rows of one page of latents, [planes, R, L] as the pool has it."""
        dtype = self._layout.window_dtype
        return {f"layers.{i}.latent": page[None, plane].astype(dtype) for plane, i in enumerate(self._mla)}

    def rows(self, page: Payload) -> np.ndarray:
        """What `page` gave, [planes, R, L] in the pool's dtype.

        Raises:
            ValueError: for anything else.
        """
        rows = (1, self._layout.page_rows, self._layout.config.latent_size)
        got = [self._leaf(page, f"layers.{i}.latent", rows, self._layout.window_dtype) for i in self._mla]
        return np.concatenate(got).astype(self._layout.dtype)

    def slot(self, boundary: int, state: Payload) -> SlotState:
        """What `state` gave.

        Raises:
            ValueError: for anything else, and for the state of another boundary.
        """
        layout, inside = self._layout, boundary % self._layout.page_rows
        window = layout.window_dtype
        recurrent = [
            self._leaf(state, f"layers.{i}.recurrent", self._recurrent, np.float32) for i in self._kda
        ]
        conv = [self._leaf(state, f"layers.{i}.conv", self._conv, window) for i in self._kda]
        rows = (1, inside, layout.config.latent_size)
        latent = [self._leaf(state, f"layers.{i}.latent", rows, window) for i in self._mla]
        for i in (*self._kda, *self._mla):
            at = int(self._leaf(state, f"layers.{i}.position", (1,), np.int32)[0])
            if at != boundary:
                raise ValueError(f"the state is that of {at} tokens, not of {boundary}")
        tail = None
        if inside:
            tail = np.zeros(self._page_shape, layout.dtype)
            tail[:, :inside] = np.concatenate(latent)
        return SlotState(tuple(recurrent), tuple(conv), tail)

    @property
    def _page_shape(self) -> tuple[int, int, int]:
        return self._layout.num_planes, self._layout.page_rows, self._layout.config.latent_size

    def _leaf(self, payload: Payload, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if not isinstance(payload, Mapping) or name not in payload:
            raise ValueError(f"the checkpoint lacks {name}")
        leaf = np.asarray(payload[name])
        if leaf.shape != shape or leaf.dtype != dtype:
            raise ValueError(f"{name} is {leaf.dtype} {leaf.shape}, expected {np.dtype(dtype)} {shape}")
        return leaf
