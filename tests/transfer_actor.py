"""A process with a store of its own that does what its parent says, and what a parent asks for and expects of it.

Every call's time is held against its deadline.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple, Self

import transfer_stage
from transfer.mooncake.local import LocalMooncake
from transfer_stage import contents, digest

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
NBYTES, PART = 1 << 16, 1 << 14  # of a checkpoint and of its parts, if not said otherwise
TIMEOUT_S, SHORT_S = 3.0, 1.5
SLACK_S = (
    2.5  # above a deadline, for a busy machine; what hangs in Mooncake does so for 4 s or more beyond it
)
AGAIN_S = 25.0
REPLY_S = 90.0
THERE = ("stored", "held")


class Died(Exception):
    """The process ended before it had replied."""


class Reply(NamedTuple):
    """What a call gave or raised (the error's name and text), and how long the store took, seconds."""

    value: Any
    raised: str | None
    seconds: float


class Actor:
    """A running process. Leaving its `with` ends it, and asserts that it ended well unless it was killed."""

    def __init__(self, store: str, **settings: Any) -> None:
        """Opens a store: `memory` or `mooncake`, and what its constructor takes."""
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, transfer_stage.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self._waiting: dict[int, Future[Reply]] = {}
        self._calls, self._killed = 0, False
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.do("open", store=store, settings=settings)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def begin(self, call: str, **arguments: Any) -> Future[Reply]:
        """Starts a call, beside others that run."""
        future: Future[Reply] = Future()
        with self._lock:
            self._calls += 1
            number = self._calls
            self._waiting[number] = future
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(
                json.dumps({"number": number, "call": call, **arguments}).encode() + b"\n"
            )
            self._process.stdin.flush()
        except OSError:
            self._fail()
        return future

    def finish(self, future: Future[Reply], timeout: float | None = None) -> Any:
        """A call's value. Asserts that it raised nothing and kept its deadline."""
        reply = future.result(REPLY_S)
        assert reply.raised is None, f"{reply.raised}\n{self.said()}"
        assert timeout is None or reply.seconds <= timeout + SLACK_S, f"{reply.seconds} s for {timeout=}"
        return reply.value

    def do(self, call: str, **arguments: Any) -> Any:
        """A call's value, see `finish`."""
        return self.finish(self.begin(call, **arguments), arguments.get("timeout"))

    def kill(self) -> None:
        """Kills it, as `kill -9` does, and waits until it is gone."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._killed = self._killed or number == signal.SIGKILL
        self._process.send_signal(number)

    def wait_killed(self) -> None:
        """Waits until it has killed itself."""
        assert self._process.wait(REPLY_S) == -signal.SIGKILL, self.said()
        self._killed = True

    def said(self) -> str:
        """What it wrote to stderr."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or self._killed:
            self._process.kill()
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            code = self._process.wait(REPLY_S)
        finally:
            self._process.kill()
            self._reader.join()
            self._process.stdout.close()
            said = self.said()
            self._log.close()
        assert kind is not None or self._killed or code == 0, f"ended with {code}\n{said}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reply = json.loads(line)
            with self._lock:
                future = self._waiting.pop(reply.pop("number"))
            future.set_result(Reply(**reply))
        self._fail()

    def _fail(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(Died(f"process {self.pid} has ended"))


@contextmanager
def local(
    segment_mib: int = 128, lease_ms: int = 300, ttl_s: int = 2, **settings: Any
) -> Iterator[LocalMooncake]:
    """A Mooncake that soon notices what is gone."""
    with LocalMooncake(
        segment_bytes=segment_mib * MIB, lease_ms=lease_ms, client_ttl_s=ttl_s, abandoned_put_s=2, **settings
    ) as mooncake:
        yield mooncake


def worker(mooncake: LocalMooncake, **settings: Any) -> Actor:
    """A process with a store on it, which tries a broken one again soon; one that lends no memory if not told."""
    return Actor("mooncake", master=mooncake.address, pause_s=0.3, **settings)


@cache
def expected(seed: int, nbytes: int) -> str:
    return digest(contents(seed, nbytes))


def read(
    actor: Actor, name: str, *seeds: int, nbytes: int = NBYTES, timeout: float = TIMEOUT_S
) -> int | None:
    """Fetches; which of `seeds` the contents were made from, or None for a miss. Anything else is wrong bytes."""
    found, _ = actor.do("fetch", name=name, timeout=timeout)
    return None if found is None else {expected(seed, nbytes): seed for seed in seeds}[found]


def write(actor: Actor, name: str, seed: int, timeout: float = TIMEOUT_S, **more: Any) -> str:
    return actor.do("publish", name=name, seed=seed, timeout=timeout, **{"part_nbytes": PART} | more)


def until(happened: Callable[[], bool], within: float = AGAIN_S) -> bool:
    """Tries again, as a cache does with every checkpoint that it makes."""
    end = monotonic() + within
    while not happened():
        if monotonic() > end:
            return False
        sleep(0.1)
    return True


def written_and_read(writer: Actor, reader: Actor, name: str, seed: int, **more: Any) -> bool:
    """Whether a checkpoint could be written, or was there, and read."""
    there = write(writer, name, seed, **more) in THERE
    return there and read(reader, name, seed, nbytes=more.get("nbytes", NBYTES)) == seed
