"""Writes the trace of an agent workload from a seed, in Mooncake's format.

    python -m benchmarks.agent_trace agent.jsonl --seed 3

Agents of six kinds share long system prompts. A session adds a task to one of them and takes 4 to 60 turns; each
adds the model's output and a tool's result. Now and then a turn starts a second agent that shares all of its prompt,
goes back to an earlier turn, or replaces a long history by a summary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from math import log
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.trace import BLOCK

KINDS = 6
SYSTEM_TOKENS = (8_000, 14_000)
TURNS, FORK_TURNS = (4, 60), (3, 12)
FORKS, FORKS_FROM = 0.05, 6_000
EDITS, SUMMARIES, SUMMARISED_FROM, SUMMARY_TOKENS = 0.04, 0.015, 40_000, 3_000
# medians and sigmas of lognormal draws, in tokens and seconds
TASK, OUTPUT, RESULT, EDIT = (3_000, 0.9), (250, 0.8), (700, 1.0), (200, 0.5)
PAUSE, LONG_PAUSE, LONG_PAUSES = (8, 0.6), (240, 0.8), 0.12


class Prompt(NamedTuple):
    """A prompt's length in tokens and the ids of its whole blocks."""

    length: int
    blocks: tuple[int, ...]


class Workload:
    """Draws sessions. The order of the draws is part of what a seed means."""

    def __init__(self, seed: int) -> None:
        self._random, self._fresh = Random(seed), count()
        self.requests: list[dict[str, Any]] = []
        none = Prompt(0, ())
        self.systems = [self._cover(none, self._random.randint(*SYSTEM_TOKENS)) for _ in range(KINDS)]

    def sessions(self, number: int, rate: float) -> None:
        """So many sessions, of which `rate` start a second."""
        clock = 0.0
        for _ in range(number):
            clock += self._random.expovariate(rate)
            system = self.systems[self._random.randrange(KINDS)]
            self._session(clock, system, self._random.randint(*TURNS), forks=True)

    def _session(self, now: float, system: Prompt, turns: int, *, forks: bool) -> None:
        draw, length, known = self._random, system.length + self._tokens(TASK), system
        history: list[Prompt] = []
        for _ in range(turns):
            known = self._cover(known, length)
            output = self._tokens(OUTPUT)
            self._request(now, known, output)
            history.append(known)
            if forks and length > FORKS_FROM and draw.random() < FORKS:
                whole = Prompt(len(known.blocks) * BLOCK, known.blocks)
                self._session(now + 1, whole, draw.randint(*FORK_TURNS), forks=False)
            act = draw.random()
            if act < EDITS and len(history) > 2:
                known = history[draw.randint(0, len(history) - 2)]
                length = known.length + self._tokens(EDIT)
            elif act < EDITS + SUMMARIES and length > SUMMARISED_FROM:
                known, length = system, system.length + SUMMARY_TOKENS
            else:
                length += output + self._tokens(RESULT)
            now += self._seconds(PAUSE if draw.random() > LONG_PAUSES else LONG_PAUSE)

    def _request(self, now: float, prompt: Prompt, output: int) -> None:
        self.requests.append(
            {
                "timestamp": int(now * 1000),
                "input_length": prompt.length,
                "output_length": output,
                "hash_ids": list(prompt.blocks),
            }
        )

    def _cover(self, prompt: Prompt, length: int) -> Prompt:
        """A prompt cut or grown, by blocks that nothing else has, to `length` tokens."""
        blocks = prompt.blocks[: length // BLOCK]
        new = (next(self._fresh) for _ in range(length // BLOCK - len(blocks)))
        return Prompt(length, (*blocks, *new))

    def _seconds(self, of: tuple[float, float]) -> float:
        return self._random.lognormvariate(log(of[0]), of[1])

    def _tokens(self, of: tuple[float, float]) -> int:
        return int(self._seconds(of))


def agent_requests(seed: int = 3, sessions: int = 300, rate: float = 0.35) -> list[dict[str, Any]]:
    """Rows of a trace, by time.

    Args:
        seed: of all draws.
        sessions: how many start, each of which may start others.
        rate: sessions that start a second.
    """
    workload = Workload(seed)
    workload.sessions(sessions, rate)
    return sorted(workload.requests, key=lambda row: row["timestamp"])


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A JSON object a line."""
    return (json.dumps(row) + "\n" for row in rows)


def write(
    out: Annotated[Path, typer.Argument(help="The trace to write.")],
    seed: int = 3,
    sessions: Annotated[int, typer.Option(help="How many start.")] = 300,
    rate: Annotated[float, typer.Option(help="How many start a second.")] = 0.35,
) -> None:
    """Write the trace of an agent workload."""
    with out.open("w") as file:
        file.writelines(lines(agent_requests(seed, sessions, rate)))


if __name__ == "__main__":
    typer.run(write)
