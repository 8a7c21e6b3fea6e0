"""Devices that a model may be laid over: how much memory each has, and how a mesh of them is written."""

from __future__ import annotations

import re
from typing import NamedTuple

from kda_jax.commands.errors import CommandError


class Device(NamedTuple):
    """A GPU, or a TPU's chip.

    Attributes:
        product: its full name.
        memory_bytes: as its data sheet has it, in GB of 10^9 bytes. Its runtime keeps some of that for itself.
    """

    product: str
    memory_bytes: int


# Source: NVIDIA's data sheets of A100 SXM, H100 SXM and H200 SXM; cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}, "HBM
# capacity".
DEVICES = {
    "a100": Device("NVIDIA A100 80GB", 80 * 10**9),
    "h100": Device("NVIDIA H100", 80 * 10**9),
    "h200": Device("NVIDIA H200", 141 * 10**9),
    "v4": Device("TPU v4", 32 * 10**9),
    "v5e": Device("TPU v5e", 16 * 10**9),
    "v5p": Device("TPU v5p", 95 * 10**9),
    "v6e": Device("TPU v6e", 32 * 10**9),
}


class MeshShape(NamedTuple):
    """Devices along a mesh's two axes, in the order in which a mesh is written: 8x4.

    Attributes:
        tensor: that share the heads out.
        expert: that hold the same heads. Experts are shared out over all devices.
    """

    tensor: int
    expert: int

    @property
    def count(self) -> int:
        """All its devices."""
        return self.tensor * self.expert

    def __str__(self) -> str:
        return f"{self.tensor}x{self.expert}"


def device_named(name: str) -> Device:
    """The device of a name.

    Raises:
        CommandError: there is none.
    """
    if name not in DEVICES:
        raise CommandError(f"no device {name!r} is known; give one of {', '.join(DEVICES)}")
    return DEVICES[name]


def mesh_shape(text: str) -> MeshShape:
    """Reads 8x4 as 8 devices for the heads, times 4.

    Raises:
        CommandError: it is written in another way.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if match is None:
        raise CommandError(
            f"{text!r} is no mesh; write 8x4 for 32 devices, 8 of which share the heads out (experts go over all)"
        )
    return MeshShape(int(match[1]), int(match[2]))
