"""Kills processes that put objects on disk, and looks at what they leave. Run as a program: forks, and prints JSON.

A process of its own with one thread, that forks quickly and safely: pytest's has many.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from transfer import DiskObjects, Item, Put, Read

KEEP = 12
BUDGETS = {"roomy": 10**9, "tight": 900_000}
STEPS = ("open", "writev", "fsync", "fstat", "close", "mkdir", "rename", "unlink", "listdir")
"""What a put and an opening ask of the system."""


def content(number: int) -> np.ndarray:
    """The bytes of object `k<number>`."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, int(rng.integers(1, 300_000)), np.uint8)


def put_for_ever(folder: Path, budget: int, first: int, sync: bool, said: int) -> None:
    """Puts objects from number `first` on, two a group, and says of each when it is stored."""
    with DiskObjects(folder, budget, sync=sync) as objects:
        os.write(said, b"open\n")
        for number in range(first, first + 10_000):
            data = content(number)
            half = data.nbytes // 2
            group = f"g{number // 2}"
            [put] = objects.put([Item(f"k{number}", [data[:half], data[half:]], group)], 30)
            os.write(said, f"{number} {put.value}\n".encode())


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """A process that does `work`, which gets a pipe's end to write to; its pid and the other end."""
    says, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(says)
            work(said)
            code = 0
        finally:
            os._exit(code)
    os.close(said)
    return pid, says


class Checker:
    """Opens the folder after each kill, and notes what should not be."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget = folder, budget
        self.stored: set[int] = set()
        self.may_drop: set[int] | None = set() if budget == BUDGETS["roomy"] else None  # None: all
        self.notes: dict[str, Any] = {"kills": 0, "half_written": 0, "lost": [], "wrong": [], "over": []}

    def look(self, said: str, next_number: int) -> int:
        """After a kill. Returns the first number that was not tried."""
        for line in said.splitlines():
            number, _, put = line.partition(" ")
            if put == Put.STORED.value:
                self.stored.add(int(number))
                next_number = int(number) + 1
        self.notes["half_written"] += bool(os.listdir(self.folder / "writing"))
        files = [path for path in self.folder.rglob("*") if path.is_file() and path.name != "lock"]
        if sum(path.stat().st_size for path in files) > self.budget:
            self.notes["over"].append(next_number)
        with DiskObjects(self.folder, self.budget, sync=False) as objects:
            assert not os.listdir(self.folder / "writing")
            numbers = [*sorted(self.stored), next_number, next_number + 1]
            for number, raw in zip(numbers, objects.get([Read(f"k{number}") for number in numbers], 60)):
                if raw is not None and raw.tobytes() != content(number).tobytes():
                    self.notes["wrong"].append(number)
                if raw is None and number in self.stored and self.may_drop is not None:
                    self.notes["lost"] += {number} - self.may_drop
            old = sorted(self.stored)[:-KEEP]
            assert all(objects.remove([f"k{number}" for number in [*old, next_number, next_number + 1]], 60))
            self.stored -= set(old)
        return next_number + 2


def at_random_instants(folder: Path, rounds: int, seed: int) -> dict[str, Any]:
    """Kills at random times, in folders with and without room."""
    rng = np.random.default_rng(seed)
    checkers = {name: Checker(folder / name, budget) for name, budget in BUDGETS.items()}
    number = 0
    for turn in range(rounds):
        checker = checkers["tight" if turn % 3 == 0 else "roomy"]
        sync = turn % 8 == 0

        def work(said: int, checker: Checker = checker, first: int = number, sync: bool = sync) -> None:
            put_for_ever(checker.folder, checker.budget, first, sync, said)

        pid, says = forked(work)
        said = os.read(says, 100)
        time.sleep(float(rng.uniform(0, 0.012)))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        checker.notes["kills"] += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        while more := os.read(says, 10_000):
            said += more
        os.close(says)
        number = checker.look(said.decode(), number)
    return {name: checker.notes for name, checker in checkers.items()}


def die_at(count: int, after: bool) -> None:
    """Makes this process kill itself before or after its `count`-th call of any of the steps."""
    calls = 0

    def dying(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return step(*args, **kwargs)
            finally:
                if calls == count and after:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in STEPS:
        setattr(os, name, dying(getattr(os, name)))


def at_every_step(folder: Path) -> dict[str, Any]:
    """Kills before and after every call to the system that an opening, two puts and an eviction make."""
    sizes = [content(number).nbytes + 64 for number in range(5)]
    budget = sum(sizes) - 1  # object 0 has to go for object 4
    notes = Checker(folder, budget).notes
    for after in (False, True):
        count, killed = 0, True
        while killed:
            count += 1
            shutil.rmtree(folder, ignore_errors=True)
            with DiskObjects(folder, budget, sync=False) as objects:
                items = [Item(f"k{number}", [content(number)]) for number in range(3)]
                assert objects.put(items, 30) == [Put.STORED] * 3

            def work(said: int, count: int = count, after: bool = after) -> None:
                os.fsync = lambda fd: (
                    None
                )  # a step as the others, but kills do not need the disk's time for it
                die_at(count, after)
                with DiskObjects(folder, budget) as objects:
                    for number in (3, 4):
                        [put] = objects.put([Item(f"k{number}", [content(number)])], 30)
                        os.write(said, f"{number} {put.value}\n".encode())

            pid, says = forked(work)
            _, status = os.waitpid(pid, 0)
            killed = os.WIFSIGNALED(status)
            assert killed or status == 0
            said = os.read(says, 10_000).decode()
            os.close(says)
            checker = Checker(folder, budget)
            checker.stored, checker.may_drop, checker.notes = {0, 1, 2}, {0}, notes
            notes["kills"] += killed
            checker.look(said, 3)
    return notes


if __name__ == "__main__":
    root, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({**at_random_instants(root, rounds, seed), "steps": at_every_step(root / "steps")}))
