"""JAX's TPU compiler, libtpu, set up to work without a TPU and to say what it made."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.check.targets import Tpu
from pallas_kernels.check.toolchain import Compiled, Kernel, build, placed, report, require, use_no_device

# What libtpu would else ask a cloud machine for, slowly and with warnings; and two processes may compile at a time.
SURROUNDINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class TpuToolchain:
    """Compiles functions for TPUs that are not there.

    Args:
        folder: taken as every toolchain takes it; not used.

    Raises:
        Missing: libtpu is not installed.
    """

    def __init__(self, folder: Path) -> None:
        del folder
        require("libtpu", "libtpu")
        os.environ.update({name: os.environ.get(name, value) for name, value in SURROUNDINGS.items()})
        use_no_device()
        self.devices: dict[str, Any] = {}

    def compile(self, function: Callable[..., Any], arguments: tuple[Any, ...], target: Tpu) -> Compiled:
        """As `Toolchain.compile`; the target is one device of its topology."""
        here = SingleDeviceSharding(self._device(target))
        start = time.perf_counter()
        made = jax.jit(function).lower(*placed(arguments, here)).compile()
        seconds = time.perf_counter() - start
        return report(made, parse(made.as_text() or ""), seconds)

    def mesh(
        self, target: Tpu, shape: tuple[int, ...], names: tuple[str, ...], topology: str | None = None
    ) -> jax.sharding.Mesh:
        """As `Toolchain.mesh`; without a topology the mesh's own shape is one."""
        topology = topology or "x".join(map(str, shape))
        name, count = f"{target.name}:{topology}", math.prod(shape)
        try:
            there = topologies.get_topology_desc(platform="tpu", topology_name=name)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"libtpu has no topology {name}: {reason}; name one of {count} devices, as {target.topology}"
            ) from None
        if len(there.devices) != count:
            raise ValueError(f"{name} has {len(there.devices)} devices, the mesh {count}; make them equal")
        return topologies.make_mesh(there, shape, names)

    def compile_on(
        self,
        mesh: jax.sharding.Mesh,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        give_up: tuple[int, ...] = (),
    ) -> Compiled:
        """As `Toolchain.compile_on`."""
        made, seconds = build(mesh, function, arguments, give_up)
        return report(made, parse(made.as_text() or ""), seconds)

    def _device(self, target: Tpu) -> Any:
        if target.name not in self.devices:
            there = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
            self.devices[target.name] = there.devices[0]
        return self.devices[target.name]


def parse(module: str) -> tuple[Kernel, ...]:
    """The kernels called in a compiled module's text, by the names they were given."""
    calls = [line for line in module.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    # Of "jit(f)/transpose(jvp(kda_states))/pallas_call" the innermost.
    names = [re.search(r'op_name="[^"]*?(\w+)\)*/pallas_call"', line) for line in calls]
    return tuple(Kernel(name[1] if name else "unknown") for name in names)
