"""The small model's programs, spoilt at will."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from engine_site import programs

from kda_jax.engine import Programs


class Rigged(Programs):
    """Programs whose calls a test may spoil."""

    def __init__(self) -> None:
        self.__dict__.update(programs().__dict__)
        self.spoil: Callable[..., None] = lambda name, *args: None
        self.after: Callable[..., Any] = lambda name, out: out

    def _run(self, name: tuple[str, int, int], *args: Any) -> Any:
        self.spoil(name[0], *args)
        return self.after(name[0], super()._run(name, *args))


def fails_once(wanted: str, lose: bool = False) -> Callable[..., None]:
    """The next call of a program fails, and takes the memory with it or not."""
    left = [1]

    def spoil(name: str, *args: Any) -> None:
        if name == wanted and left:
            left.clear()
            for leaf in jax.tree.leaves(args[0]) if lose else ():
                leaf.delete()
            raise RuntimeError("out of luck")

    return spoil
