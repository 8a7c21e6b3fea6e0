"""JAX's CUDA compiler and NVIDIA's assembler, set up to work without a GPU and to say what they made."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.check.targets import Gpu
from pallas_kernels.check.toolchain import (
    INSTALL,
    Compiled,
    Kernel,
    Missing,
    build,
    placed,
    report,
    require,
    use_no_device,
)

MACHINE = 8
"""GPUs of one machine."""


class GpuToolchain:
    """Compiles functions for GPUs that are not there.

    Args:
        folder: an empty folder for the assembler's stand-in and its log.

    Raises:
        Missing: JAX's CUDA plugin or the assembler is not installed.
    """

    def __init__(self, folder: Path) -> None:
        require("jax_cuda13_plugin", "JAX's CUDA plugin")
        self.log = folder / "log"
        _stand_in(_cuda(), folder / "cuda", self.log)
        self.options = {"xla_gpu_cuda_data_dir": str(folder / "cuda"), "xla_gpu_autotune_level": 0}
        use_no_device()
        self.meshes: dict[str, jax.sharding.Mesh] = {}

    def compile(self, function: Callable[..., Any], arguments: tuple[Any, ...], target: Gpu) -> Compiled:
        """As `Toolchain.compile`."""
        if target.name not in self.meshes:
            self.meshes[target.name] = self.mesh(target, (1,), ("x",))
        mesh = self.meshes[target.name]
        return self.compile_on(mesh, function, placed(arguments, NamedSharding(mesh, PartitionSpec())))

    def mesh(
        self, target: Gpu, shape: tuple[int, ...], names: tuple[str, ...], topology: str | None = None
    ) -> jax.sharding.Mesh:
        """As `Toolchain.mesh`; the GPUs stand in machines of eight, and there is no other topology."""
        if topology is not None:
            raise ValueError(f"{target.name} takes no topology, got {topology!r}; its mesh says it all")
        count = math.prod(shape)
        here = MACHINE if count % MACHINE == 0 else count
        there = topologies.get_topology_desc(
            platform="cuda", target_config=target.description(), topology=f"1x{count // here}x{here}"
        )
        return topologies.make_mesh(there, shape, names)

    def compile_on(
        self,
        mesh: jax.sharding.Mesh,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        give_up: tuple[int, ...] = (),
    ) -> Compiled:
        """As `Toolchain.compile_on`."""
        self.log.write_text("")
        made, seconds = build(mesh, function, arguments, give_up, self.options)
        return report(made, parse(self.log.read_text()), seconds)


def parse(log: str) -> tuple[Kernel, ...]:
    """Registers and spills by kernel, out of what `ptxas -v` says; of several runs of one kernel the last counts."""
    spilled = dict(re.findall(r"properties for (\S+)\s+\d+ bytes stack frame, (\d+) bytes spill stores", log))
    used = dict(re.findall(r"entry function '([^']+)'.*?Used (\d+) registers", log, re.S))
    return tuple(Kernel(name, int(count), int(spilled.get(name, 0))) for name, count in used.items())


def _cuda() -> Path:
    """A folder with bin/ptxas and nvvm/libdevice: pip's, else CUDA_HOME, else where ptxas on the path lies."""
    places = []
    if (spec := importlib.util.find_spec("nvidia")) is not None:
        places += [Path(place) / "cu13" for place in spec.submodule_search_locations or ()]
    if home := os.environ.get("CUDA_HOME"):
        places.append(Path(home))
    places.append(Path("/usr/local/cuda"))
    if on_path := shutil.which("ptxas"):
        places.append(Path(on_path).resolve().parent.parent)
    for place in places:
        if (place / "bin" / "ptxas").exists() and (place / "nvvm" / "libdevice").exists():
            return place
    raise Missing(f"no ptxas with its libdevice in {', '.join(map(str, places))}; {INSTALL}")


def _stand_in(cuda: Path, folder: Path, log: Path) -> None:
    """A folder like `cuda`, whose ptxas is asked to talk and is listened to."""
    (folder / "bin").mkdir(parents=True)
    for part in cuda.iterdir():
        if part.name != "bin":
            (folder / part.name).symlink_to(part)
    for tool in (cuda / "bin").iterdir():
        if tool.name != "ptxas":
            (folder / "bin" / tool.name).symlink_to(tool)
    script = folder / "bin" / "ptxas"
    real = cuda / "bin" / "ptxas"
    script.write_text(
        f'#!/bin/sh\ncase "$1" in --version) exec "{real}" "$@" ;; esac\n'
        f'"{real}" -v "$@" 2>"{log}.$$"\nstatus=$?\n'
        f'cat "{log}.$$" >>"{log}"\ncat "{log}.$$" >&2\nrm "{log}.$$"\nexit $status\n'
    )
    script.chmod(0o755)
