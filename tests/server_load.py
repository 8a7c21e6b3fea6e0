"""Those who talk to servers all the time: they check each answer, and note what failed.

`python tests/server_load.py --minutes 60` is a soak: two servers, a Mooncake, clients that hang up and bursts of more
than fits; it prints each server's memory, file descriptors and threads from time to time. First it measures for
`--pace` seconds how fast one of them serves what it accepts, in bursts of ten times its capacity against quiet periods.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any, NamedTuple

from instances_site import LENGTH, QUEUED, SLOTS, Answer, Instance, Model, Turn

from transfer.mooncake.local import LocalMooncake

MIB = 1 << 20
AT_ONCE = 70
"""Requests of a burst: two run and four or five wait, the others are too many."""
PERIOD_S, PACED, PROMPTS = 5.0, 32, 40
"""Seconds of a quiet period and of a burst, tokens of a request whose times are taken, and prompts that are drawn from:
more than are kept."""


class Process(NamedTuple):
    """What a process holds: resident bytes, open files, threads."""

    rss: int
    files: int
    threads: int


def process(pid: int) -> Process:
    """What a process holds now."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    rss = int(status["VmRSS"].split()[0]) << 10
    return Process(rss, len(list((folder / "fd").iterdir())), int(status["Threads"]))


class Load:
    """Threads that take conversations turn by turn, each turn at a server that is drawn.

    Attributes:
        servers: that are asked; whoever replaces one that was killed puts another in its place.
        happened: what, and how often.
        answers: of each server, by process id.
        wrong: what no server that lives may do.
    """

    def __init__(self, model: Model, servers: list[Instance], conversations: Sequence[list[Turn]]) -> None:
        self.servers, self.happened, self.wrong = servers, Counter[str](), list[str]()
        self.answers = Counter[int]()
        self.conversations, self._model, self._stop = conversations, model, threading.Event()

    def one(self, choose: random.Random) -> None:
        """One turn, the next one of a conversation or any."""
        conversation = choose.choice(self.conversations)
        for turn in conversation[: choose.randint(1, len(conversation))]:
            server = choose.choice(self.servers)
            try:
                answer = server.ask(turn.prompt, len(turn.alone.tokens))
            except (OSError, HTTPException) as error:
                if server.killed:
                    self.happened["died with its server"] += 1
                else:
                    self.wrong.append(f"{server.address}: {error!r}")
                return
            self.note(server, turn, answer)

    def note(self, server: Instance, turn: Turn, answer: Answer) -> None:
        """Checks an answer: the right tokens, or that there was too much to do."""
        if answer.status == 429:
            self.happened["429"] += 1
            if not (answer.retry_after or "").isdecimal():
                self.wrong.append(f"{server.address}: 429 without a time to come again")
            return
        try:
            self._model.check(turn, answer)
        except AssertionError as error:
            self.wrong.append(f"{server.address}: {error}")
        self.happened["answers"] += 1
        self.answers[server.pid] += 1
        self.happened.update({f"tokens from {tier}": count for tier, count in answer.cached.items()})

    def _go_on(self, seed: int, pause: float) -> None:
        choose = random.Random(seed)
        while not self._stop.wait(pause):
            self.one(choose)

    @contextmanager
    def running(self, threads: int = 3, pause: float = 0.4) -> Iterator[None]:
        """Goes on until the block ends."""
        self._stop.clear()
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(self._go_on, seed, pause) for seed in range(threads)]
            try:
                yield
            finally:
                self._stop.set()
        for future in futures:
            future.result()


def hang_up(server: Instance, turn: Turn) -> None:
    """Asks for more than there is time for, and goes away."""
    body = json.dumps(
        {"model": "m", "prompt": turn.prompt, "max_tokens": 200, "temperature": 0, "stream": True}
    )
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        connection.recv(100)


def burst(server: Instance, turns: Sequence[Turn]) -> list[Answer]:
    """All at once."""
    with ThreadPoolExecutor(len(turns)) as pool:
        return list(pool.map(lambda turn: server.ask(turn.prompt, len(turn.alone.tokens)), turns))


def idle(server: Instance) -> bool:
    """Whether nothing is left of any request."""
    states = ("waiting", "loading", "running")
    return not any(server.number(f'kda_requests{{state="{state}"}}') for state in states)


def until(true: Callable[[], bool], within: float = 60.0) -> bool:
    """Whether something becomes true."""
    deadline = monotonic() + within
    while not (found := true()) and monotonic() < deadline:
        sleep(0.05)
    return found


def soak(load: Load, seconds: float, seed: int = 0) -> None:
    """Servers under load, beside clients that hang up and bursts of ten times what fits."""
    choose, end = random.Random(seed), monotonic() + seconds
    with load.running():
        while monotonic() < end:
            server = choose.choice(load.servers)
            hang_up(server, choose.choice(load.conversations)[0])
            asked = [choose.choice(turns)[0] for turns in [load.conversations] * AT_ONCE]
            for turn, answer in zip(asked, burst(server, asked)):
                load.note(server, turn, answer)
            sleep(0.2)


def pace(server: Instance, seconds: float) -> dict[str, Any]:
    """The times of accepted requests in quiet periods and in bursts, see `server_pace`; quiet ones fill a server, its
    queue too."""
    choose = random.Random(0)
    prompts = [choose.choices(range(256), k=LENGTH) for _ in range(PROMPTS)]
    periods = max(1, round(seconds / (2 * PERIOD_S)))
    ask = {"model": "m", "max_tokens": PACED, "temperature": 0, "stream": True}
    asked = {
        "address": server.address,
        "bodies": [json.dumps({**ask, "prompt": prompt}) for prompt in prompts],
        "clients": SLOTS + QUEUED // LENGTH - 1,
        "periods": periods,
        "seconds": PERIOD_S,
    }
    line = [sys.executable, str(Path(__file__).with_name("server_pace.py"))]
    ended = subprocess.run(line, input=json.dumps(asked), capture_output=True, text=True, check=True)
    return json.loads(ended.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--model", type=Path, required=True, help="a folder; the test's `byte_model`")
    parser.add_argument("--pace", type=float, default=60.0, help="seconds; 0 for none")
    asked = parser.parse_args()
    with LocalMooncake(segment_bytes=64 * MIB) as mooncake, ExitStack() as closing:
        store = f"mooncake:{mooncake.address}"
        compiled = Path(closing.enter_context(TemporaryDirectory()))
        servers = [closing.enter_context(Instance(asked.model, store, compiled)) for _ in range(2)]
        if asked.pace:
            print(json.dumps(pace(servers[0], asked.pace)), flush=True)
        model = Model(asked.model)
        load = Load(model, servers, [model.conversation(seed) for seed in range(12)])
        soak(load, 10.0)
        for minute in range(int(asked.minutes) + 1):
            for server in servers:
                held = process(server.pid)
                print(
                    f"{minute:4} min, server {server.pid}: {held.rss / MIB:.0f} MiB, {held.files} files, "
                    f"{held.threads} threads",
                    flush=True,
                )
            if minute < asked.minutes:
                soak(load, 60.0, minute)
        print(dict(load.happened), load.wrong)


if __name__ == "__main__":
    main()
