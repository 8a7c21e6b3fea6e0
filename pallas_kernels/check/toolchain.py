"""What the toolchains share: each compiles functions for devices that are not there, and says what it made."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

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
    """What came of a function.

    Attributes:
        kernels: those in it; of a TPU's only those written by hand, of a GPU's all.
        seconds: that it took to lower and to compile.
        code_bytes: of the program.
        temporary_bytes: of device memory, that it needs beside its arguments and results.
    """

    kernels: tuple[Kernel, ...]
    seconds: float
    code_bytes: int
    temporary_bytes: int


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


def require(module: str, what: str) -> None:
    """Raises Missing where a module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Missing(f"{what} is not installed; {INSTALL}")


def use_no_device() -> None:
    """Keeps JAX from looking for devices, and from answering out of its compilation cache."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # what is not compiled says nothing


def report(made: jax.stages.Compiled, kernels: tuple[Kernel, ...], seconds: float) -> Compiled:
    """With the program's own word on its memory."""
    memory: Any = made.memory_analysis()
    return Compiled(kernels, seconds, memory.generated_code_size_in_bytes, memory.temp_size_in_bytes)


def placed(arguments: tuple[Any, ...], where: jax.sharding.Sharding) -> tuple[Any, ...]:
    """The arguments' shapes and dtypes on a device."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arguments)
