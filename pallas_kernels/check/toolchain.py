"""What the toolchains share: each compiles functions for devices that are not there, and says what it made."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import use_abstract_mesh

INSTALL = "`make check` installs it"


class Missing(Exception):
    """A tool is not installed; the message names it and the way out."""


class Kernel(NamedTuple):
    """What the compiler said of one kernel.

    Attributes:
        name: the name it carries.
        registers: a thread's; None on a TPU.
        spill_bytes: stores of registers to memory, bytes a thread; None on a TPU.
    """

    name: str
    registers: int | None = None
    spill_bytes: int | None = None


class Compiled(NamedTuple):
    """What came of a function. Bytes are those of one device's memory.

    Attributes:
        kernels: those in it; of a TPU's only those written by hand, of a GPU's all.
        seconds: that it took to lower and to compile.
        code_bytes: of the program.
        temporary_bytes: that it needs beside its arguments and results.
        argument_bytes, output_bytes: of these.
        reused_bytes: results that lie where an argument lay that was given up.
    """

    kernels: tuple[Kernel, ...]
    seconds: float
    code_bytes: int
    temporary_bytes: int
    argument_bytes: int
    output_bytes: int
    reused_bytes: int


@runtime_checkable
class Toolchain(Protocol):
    """Compiles for one platform."""

    def compile(self, function: Callable[..., Any], arguments: tuple[Any, ...], target: Any) -> Compiled:
        """Compiles a function of arrays for a target.

        Args:
            function: what to compile.
            arguments: its arguments' shapes and dtypes, pytrees of `jax.ShapeDtypeStruct`.
            target: what for, one of the platform's targets.
        """
        ...

    def mesh(
        self, target: Any, shape: tuple[int, ...], names: tuple[str, ...], topology: str | None = None
    ) -> jax.sharding.Mesh:
        """A mesh of devices that are not there.

        Args:
            target: of which kind.
            shape, names: of its axes.
            topology: how the devices are connected, as the platform writes it ("8x8"); None for its own choice.

        Raises:
            ValueError: the platform has no such topology, or not of so many devices.
        """
        ...

    def compile_on(
        self,
        mesh: jax.sharding.Mesh,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        give_up: tuple[int, ...] = (),
    ) -> Compiled:
        """Compiles a function for all devices of a mesh.

        Args:
            mesh: one that `mesh` made.
            function: what to compile.
            arguments: as of `compile`, each leaf with its sharding on the mesh.
            give_up: numbers of arguments whose memory results may take.
        """
        ...


def require(module: str, what: str) -> None:
    """Raises Missing where a module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Missing(f"{what} is not installed; {INSTALL}")


def use_no_device() -> None:
    """Keeps JAX from looking for devices, and from answering out of its compilation cache."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # what is not compiled says nothing


def build(
    mesh: jax.sharding.Mesh,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    give_up: tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[jax.stages.Compiled, float]:
    """Lowers and compiles for a mesh, and says how many seconds it took."""
    start = time.perf_counter()
    with use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function, donate_argnums=give_up).lower(*arguments)
        made = lowered.compile(compiler_options=dict(options or {}))
    return made, time.perf_counter() - start


def report(made: jax.stages.Compiled, kernels: tuple[Kernel, ...], seconds: float) -> Compiled:
    """With the program's own word on its memory."""
    memory: Any = made.memory_analysis()
    return Compiled(
        kernels,
        seconds,
        code_bytes=memory.generated_code_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        reused_bytes=memory.alias_size_in_bytes,
    )


def placed(arguments: tuple[Any, ...], where: jax.sharding.Sharding) -> tuple[Any, ...]:
    """The arguments' shapes and dtypes on a device."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arguments)
