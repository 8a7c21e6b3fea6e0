"""JAX's CUDA compiler and NVIDIA's assembler, set up to work without a GPU and to say what they made."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from pallas_kernels.check.targets import Target

INSTALL = "`make check` installs it"


class Missing(Exception):
    """A tool is not installed; the message names it and the way out."""


class Compiled(NamedTuple):
    """What the assembler said of one kernel.

    Attributes:
        registers: a thread's.
        spill_bytes: stores of registers to memory, bytes a thread.
    """

    registers: int
    spill_bytes: int


class Toolchain:
    """Compiles functions for GPUs that are not there.

    Args:
        folder: an empty folder for the assembler's stand-in and its log.

    Raises:
        Missing: JAX's CUDA plugin or the assembler is not installed.
    """

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("jax_cuda13_plugin") is None:
            raise Missing(f"JAX's CUDA plugin is not installed; {INSTALL}")
        self.log = folder / "log"
        _stand_in(_cuda(), folder / "cuda", self.log)
        self.options = {"xla_gpu_cuda_data_dir": str(folder / "cuda"), "xla_gpu_autotune_level": 0}
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_compilation_cache", False)  # what is not compiled says nothing
        self.meshes: dict[str, jax.sharding.Mesh] = {}

    def compile(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], target: Target
    ) -> tuple[dict[str, Compiled], float]:
        """Compiles a function of arrays for a target.

        Args:
            function: what to compile.
            arguments: its arguments' shapes and dtypes, pytrees of `jax.ShapeDtypeStruct`.
            target: what for.

        Returns:
            What became of each kernel in it, by the name it carries, and the seconds it took.
        """
        mesh = self._mesh(target)
        here = NamedSharding(mesh, PartitionSpec())
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments)
        self.log.write_text("")
        start = time.perf_counter()
        with use_abstract_mesh(mesh.abstract_mesh):
            jax.jit(function).lower(*placed).compile(compiler_options=self.options)
        return parse(self.log.read_text()), time.perf_counter() - start

    def _mesh(self, target: Target) -> jax.sharding.Mesh:
        if target.name not in self.meshes:
            there = topologies.get_topology_desc(
                platform="cuda", target_config=target.description(), topology="1x1x1"
            )
            self.meshes[target.name] = topologies.make_mesh(there, (1,), ("x",))
        return self.meshes[target.name]


def parse(log: str) -> dict[str, Compiled]:
    """Registers and spills by kernel, out of what `ptxas -v` says; of several runs of one kernel the last counts."""
    spilled = dict(re.findall(r"properties for (\S+)\s+\d+ bytes stack frame, (\d+) bytes spill stores", log))
    used = re.findall(r"entry function '([^']+)'.*?Used (\d+) registers", log, re.S)
    return {name: Compiled(int(registers), int(spilled.get(name, 0))) for name, registers in used}


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
