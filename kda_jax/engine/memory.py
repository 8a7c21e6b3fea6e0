"""The device arrays that all requests share: one pool of equal pages, and slots for the running ones."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kda_jax.config import ModelConfig


class Memory(NamedTuple):
    """The arrays. The programs give them up and return them, written in place.

    Attributes:
        planes: one an MLA layer, [pages, R, L] in the pool's dtype. Page p is row p of every plane. It holds R
            latent rows of a sequence, or a piece of a snapshot. Page 0 is nobody's: padding writes there.
        recurrent: one a KDA layer, float32 [slots, HV, K, V]. Slot 0 is nobody's.
        conv: one a KDA layer, [slots, W-1, C] in the model's dtype.
    """

    planes: tuple[jax.Array, ...]
    recurrent: tuple[jax.Array, ...]
    conv: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The sizes of a `Memory`.

    Attributes:
        config: the model's.
        dtype: of the pool. The model's, but float32 on a CPU, whose compiler moves bfloat16 by way of float32: the
            bits of a NaN change, and half a number of a snapshot can look like one; and it copies whole planes.
        window_dtype: of the convolution windows in slots, the model's.
        num_slots: requests that can run at once, and one: slot 0 is never given out.
        num_pages: pages, page 0 included, which is never given out.
        page_rows: tokens a page of latents (R).
        max_tokens: most tokens of a sequence.

    Raises:
        ValueError: a model without latent attention, sizes that are not positive, too few pages for one sequence
            of `max_tokens` and a snapshot of its state, or a pool narrower than the windows.
    """

    config: ModelConfig
    dtype: jnp.dtype
    window_dtype: jnp.dtype
    num_slots: int
    num_pages: int
    page_rows: int
    max_tokens: int

    def __post_init__(self) -> None:
        if not self.num_planes:
            raise ValueError("pages are rows of latents, and this model has no layer of latent attention")
        if self.num_slots < 2 or self.page_rows < 1 or self.max_tokens < 1:
            raise ValueError(
                f"num_slots={self.num_slots} must be at least 2 (slot 0 is never given out), "
                f"page_rows={self.page_rows} and max_tokens={self.max_tokens} positive"
            )
        if self.dtype.itemsize < self.window_dtype.itemsize or self.dtype.itemsize > 4:
            raise ValueError(
                f"a pool of {self.dtype} cannot hold windows of {self.window_dtype}: use float32"
            )
        need = 1 + self.table_width + self.state_pages + 1
        if self.num_pages < need:
            raise ValueError(
                f"a sequence of {self.max_tokens} tokens and a snapshot of its state need {need} pages of "
                f"{self.page_nbytes} bytes, got {self.num_pages}: give more bytes, or allow fewer tokens"
            )

    @classmethod
    def within(
        cls,
        config: ModelConfig,
        dtype: DTypeLike,
        *,
        nbytes: int,
        num_slots: int,
        page_rows: int = 64,
        max_tokens: int | None = None,
    ) -> Layout:
        """As many pages as fit into `nbytes` beside the slots.

        Args:
            config: the model's.
            dtype: the model's.
            nbytes: of the whole memory, at most.
            num_slots, page_rows: as in the attributes.
            max_tokens: of a sequence; the model's limit when None.
        """
        window = jnp.dtype(dtype)
        one = cls(
            config=config,
            dtype=jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else window,
            window_dtype=window,
            num_slots=num_slots,
            num_pages=2**31,
            page_rows=page_rows,
            max_tokens=max_tokens or config.model_max_length,
        )
        left = nbytes - num_slots * one.slot_nbytes
        return dataclasses.replace(one, num_pages=max(0, left // one.page_nbytes))

    @property
    def num_planes(self) -> int:
        """MLA layers."""
        return self.config.layers.count("mla")

    @property
    def page_size(self) -> int:
        """Elements of a page, all planes together."""
        return self.num_planes * self.page_rows * self.config.latent_size

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page, all planes together."""
        return self.page_size * self.dtype.itemsize

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot, all KDA layers together."""
        config, kda = self.config, self.config.layers.count("kda")
        recurrent = config.kda_value_heads * config.kda_head_dim * config.kda_value_dim
        window = (config.conv_size - 1) * config.conv_channels
        return kda * (4 * recurrent + self.window_dtype.itemsize * window)

    @property
    def state_pages(self) -> int:
        """Pages that the KDA states of one sequence take (k), anywhere in the pool."""
        config, kda = self.config, self.config.layers.count("kda")
        widened = (
            (self.dtype.itemsize - self.window_dtype.itemsize) * (config.conv_size - 1) * config.conv_channels
        )
        return -(-(self.slot_nbytes + kda * widened) // self.page_nbytes)

    @property
    def table_width(self) -> int:
        """Pages of latents of the longest sequence."""
        return -(-self.max_tokens // self.page_rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole memory."""
        return self.num_pages * self.page_nbytes + self.num_slots * self.slot_nbytes

    def snapshot_pages(self, position: int) -> int:
        """Pages of a snapshot at `position`: `state_pages`, and one for the rows of an unfinished page of latents."""
        return self.state_pages + (position % self.page_rows > 0)


def empty_memory(layout: Layout) -> Memory:
    """A memory of zeros."""
    config, kda = layout.config, layout.config.layers.count("kda")
    slots = layout.num_slots
    states = (slots, config.kda_value_heads, config.kda_head_dim, config.kda_value_dim)
    windows = (slots, config.conv_size - 1, config.conv_channels)
    plane = (layout.num_pages, layout.page_rows, config.latent_size)
    return Memory(
        tuple(jnp.zeros(plane, layout.dtype) for _ in range(layout.num_planes)),
        tuple(jnp.zeros(states, jnp.float32) for _ in range(kda)),
        tuple(jnp.zeros(windows, layout.window_dtype) for _ in range(kda)),
    )
