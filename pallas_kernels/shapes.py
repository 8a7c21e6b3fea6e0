"""The sizes that kernels are checked at: those of real models, and a small one."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """The layers of a model, and how much they are given to do.

    Attributes:
        tokens: of one prefill.
        rows: of one decode step.
        heads, keys, values: a KDA layer's heads, and a head's key and value channels.
        gate_lower_bound: of a KDA layer's log decays; None for the gate without one.
        window: tokens that a short convolution sees, its own included.
        latents, shared: an MLA layer's latent channels, and those of its shared key (64 that would be rotated).
        context: tokens that a row has behind it when it decodes.
        page: tokens of a page of latents.
    """

    name: str
    tokens: int
    rows: int
    heads: int
    keys: int
    values: int
    gate_lower_bound: float | None = None
    window: int = 4
    latents: int = 512
    shared: int = 64
    context: int = 8192
    page: int = 64


SHAPES = (
    Shape("kimi-linear-48b", tokens=8192, rows=64, heads=32, keys=128, values=128),
    Shape("kimi-k3", tokens=8192, rows=64, heads=96, keys=128, values=128, gate_lower_bound=-5.0),
    Shape("small", tokens=2048, rows=8, heads=4, keys=64, values=64, latents=128, shared=32, context=1024),
)
