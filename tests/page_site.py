"""A process that pushes and receives pages, driven by calls of plain values: this one, or another by JSON lines.

`python tests/page_site.py '{"peer": ..., ...}'` answers each line `[method, arguments]` with `[value, error]`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from transfer.pages import Descriptor, MooncakeWire, PageLink, Pool

ROOT = Path(__file__).resolve().parent.parent
LEASH = ROOT / "transfer" / "mooncake" / "leash.py"


class Site:
    """A pool of random pages and its link; every argument and result is a JSON value."""

    def __init__(self, link: PageLink, pool: Pool) -> None:
        self.link, self.pool = link, pool
        self._begun: threading.Thread | None = None
        self._outcome = ""

    def descriptor(self) -> str:
        return self.link.descriptor.to_json()

    def open(self, pages: list[int]) -> int:
        return self.link.open(pages)

    def abandon(self, attempt: int) -> None:
        self.link.abandon(attempt)

    def gone(self, attempt: int) -> None:
        self.link.gone(attempt)

    def poll(self) -> list[list[Any]]:
        return [[attempt, list(pages), change.value] for attempt, pages, change in self.link.poll()]

    def push(self, descriptor: str, attempt: int, local: list[int], remote: list[int], timeout: float) -> str:
        return self.link.push(Descriptor.from_json(descriptor), attempt, local, remote, timeout).value

    def begin(self, *arguments: Any) -> None:
        """Pushes on a thread."""

        def push() -> None:
            self._outcome = self.push(*arguments)

        self._begun = threading.Thread(target=push, daemon=True)
        self._begun.start()

    def end(self) -> str:
        """The outcome of what was begun."""
        assert self._begun is not None
        self._begun.join(60)
        return self._outcome

    def push_each(self, descriptor: str, attempts: list[int], pages: list[int]) -> list[str]:
        """Each page by an attempt of its own, to the page of its number, all at once."""
        with ThreadPoolExecutor(len(pages)) as threads:
            pushes = [
                threads.submit(self.push, descriptor, attempt, [page], [page], 20.0)
                for attempt, page in zip(attempts, pages)
            ]
            return [push.result() for push in pushes]

    def held(self) -> list[int]:
        return sorted(self.link.held)

    def lent(self) -> list[int]:
        return sorted(self.link.lent)

    def running(self) -> list[list[Any]]:
        return sorted(list(sent) for sent in self.link.running)

    def fill(self, pages: list[int], value: int) -> None:
        for plane in self.pool.planes:
            for page in pages:
                self.pool.page(plane, page)[:] = value

    def page(self, page: int) -> str:
        """Its bytes in all planes."""
        return b"".join(self.pool.page(plane, page).tobytes() for plane in sorted(self.pool.planes)).hex()

    def pages(self, pages: list[int]) -> list[str]:
        return [self.page(page) for page in pages]

    def filled(self, value: int) -> int:
        """How many pages begin with it."""
        plane = next(iter(self.pool.planes.values()))
        return int((plane[:: self.pool.page_nbytes] == value).sum())

    def values(self) -> list[int]:
        """The distinct bytes of all pages."""
        return np.unique(np.concatenate(list(self.pool.planes.values()))).tolist()

    def close(self) -> None:
        self.link.close()


def random_pool(seed: int, num_pages: int, page_nbytes: int, planes: list[str]) -> Pool:
    """Pages of random bytes."""
    rng = np.random.default_rng(seed)
    return Pool(
        {name: rng.integers(0, 256, num_pages * page_nbytes, np.uint8) for name in planes}, page_nbytes
    )


class Child:
    """A `Site` over Mooncake in a process of its own."""

    def __init__(self, environment: dict[str, str], **options: Any) -> None:
        self.process = subprocess.Popen(
            # on a leash, since a stopped process would outlive a killed test
            [sys.executable, str(LEASH), str(os.getpid()), sys.executable, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._answer()

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.ask(method, *arguments)
            return self._answer()

        return call

    def ask(self, method: str, *arguments: Any) -> None:
        """Calls, and does not wait for the answer."""
        assert self.process.stdin is not None
        print(json.dumps([method, arguments]), file=self.process.stdin, flush=True)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        value, error = json.loads(line)
        if error:
            raise RuntimeError(error)
        return value

    def kill(self) -> None:
        """As `kill -9`."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def main(peer: str, seed: int, num_pages: int, page_nbytes: int, planes: list[str], settle: float) -> None:
    """Answers lines until there are no more."""
    pool = random_pool(seed, num_pages, page_nbytes, planes)
    site = Site(PageLink(pool, peer, time.time_ns(), MooncakeWire(), settle), pool)
    print(json.dumps([None, None]), flush=True)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = [getattr(site, method)(*arguments), None]
        except Exception as error:
            answer = [None, f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
