"""How fast accepted requests are served while others are turned away, against a server that only has enough to do.

A process of its own, without anything that takes long to import or shares an interpreter with what it measures:
`server_load.py` starts it. Quiet periods have clients who ask again as soon as they have been answered, as many as fit
with none turned away; in bursts ten times what they got comes on top. All are streams, and every accepted one counts.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple

TIMES = 10
"""What comes in bursts, of what was served in the first quiet period."""


class Served(NamedTuple):
    """What happened in periods of one kind: seconds to the first token, seconds between tokens, answers by status."""

    first: list[float]
    between: list[float]
    answers: dict[str, int]


class Pace:
    """Streams of one server."""

    def __init__(self, address: str, bodies: Sequence[str], clients: int) -> None:
        """
        Args:
            address: HOST:PORT.
            bodies: of requests, each of a stream; they are drawn.
            clients: that ask all the time.
        """
        self._host, port = address.split(":")
        self._port, self._bodies, self._clients = int(port), bodies, clients
        self._choose = random.Random(0)

    async def measure(self, periods: int, seconds: float) -> dict[str, Served]:
        """Alternates quiet periods and bursts, so many of each, after one that does not count."""
        seen = {kind: Served([], [], {}) for kind in ("warm-up", "quiet", "burst")}
        await self._period(seen["warm-up"], seconds, 0.0)
        rate = 0.0
        for _ in range(periods):
            await self._period(seen["quiet"], seconds, 0.0)
            rate = rate or TIMES * seen["quiet"].answers.get("200", 0) / seconds
            await self._period(seen["burst"], seconds, rate)
        return seen

    async def _period(self, seen: Served, seconds: float, rate: float) -> None:
        """Ends when all that was asked for has been answered, so that a period leaves nothing to the next one."""
        end = monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._clients):
                tasks.create_task(self._go_on(seen, end))
            began, asked = monotonic(), 0
            while (now := monotonic()) < end:
                while rate and asked < (now - began) * rate:
                    tasks.create_task(self._ask(seen))
                    asked += 1
                await asyncio.sleep(0.005)

    async def _go_on(self, seen: Served, end: float) -> None:
        while monotonic() < end:
            if await self._ask(seen) != "200":
                await asyncio.sleep(0.1)

    async def _ask(self, seen: Served) -> str:
        """One request, begun and ended; its status."""
        body = self._choose.choice(self._bodies)
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        before, first = monotonic(), True
        status = (await reader.readline()).split()[1].decode()
        async for line in reader:
            if line.startswith(b'data: {"id"') and b'"finish_reason": null' in line:
                now = monotonic()
                (seen.first if first else seen.between).append(now - before)
                before, first = now, False
        writer.close()
        seen.answers[status] = seen.answers.get(status, 0) + 1
        return status


def summary(seen: dict[str, Served]) -> dict[str, Any]:
    """Median and 99th percentile of both times, in milliseconds, and what a burst makes of them."""
    found: dict[str, Any] = {"answers": {kind: seen[kind].answers for kind in ("quiet", "burst")}}
    for name in ("first", "between"):
        for quantile in (0.5, 0.99):
            quiet, burst = (1e3 * at(getattr(seen[kind], name), quantile) for kind in ("quiet", "burst"))
            found[f"{name} p{100 * quantile:.0f}"] = {
                "quiet_ms": round(quiet, 2),
                "burst_ms": round(burst, 2),
                "ratio": round(burst / quiet, 3),
            }
    return found


def at(values: Sequence[float], quantile: float) -> float:
    """The least value that so many are not above."""
    return sorted(values)[math.ceil(quantile * len(values)) - 1] if values else math.nan


def main() -> None:
    asked = json.load(sys.stdin)
    pace = Pace(asked["address"], asked["bodies"], asked["clients"])
    print(json.dumps(summary(asyncio.run(pace.measure(asked["periods"], asked["seconds"])))))


if __name__ == "__main__":
    main()
