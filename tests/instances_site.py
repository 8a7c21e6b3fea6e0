"""Processes of `kda_jax serve` that share a Mooncake, what they are asked, and what a prompt makes alone."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cached_property
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from engine_site import Cold, cold

import kda_jax
from kda_jax.commands.serve import GB
from kda_jax.engine import Layout, Programs
from kda_jax.forward import config_of, split

ROOT = Path(__file__).resolve().parent.parent
SLOTS, MAX_TOKENS, BUDGET, MEMORY_GB = 2, 2048, 128, 0.001
QUEUED = 8000
LENGTH, COUNT, NEXT = 1500, 8, 30
"""Tokens of a conversation's first prompt, that a turn generates, and that the next turn adds. It is long, as loading
must be quicker than computing to be chosen."""
ANSWER_S, STOP_S = 60.0, 30.0
_KEPT = {"JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"}
"""They come before the option of a server."""
GAP = 1e-3
"""Between the logits of a token and of any other one: more than rounding, so that no other order of computing makes
another text."""


class Answer(NamedTuple):
    """What a server made of a prompt.

    Attributes:
        status: of HTTP; what follows is of 200.
        spelled: each token as text.
        logprobs: of each token.
        cached: prompt tokens that were restored, by tier.
        retry_after: the header, if there is one.
    """

    status: int
    spelled: list[str]
    logprobs: list[float]
    cached: dict[str, int]
    retry_after: str | None


class Instance:
    """A running server. Leaving its `with` ends it, and asserts that it ended well unless it was killed."""

    def __init__(self, model: Path, store: str, compiled: Path) -> None:
        """Starts one, on a free port, that keeps its programs in a folder; `address` waits for it."""
        self._log, self.killed = tempfile.TemporaryFile("w+"), False
        sizes = {
            "--port": 0,
            "--name": "m",
            "--store": store,
            "--slots": SLOTS,
            "--max-tokens": MAX_TOKENS,
            "--budget": BUDGET,
            "--memory-gb": MEMORY_GB,
            "--queued": QUEUED,
            "--compiled": compiled,
        }
        line = [str(part) for option in sizes.items() for part in option]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kda_jax", "serve", str(model), *line],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={name: value for name, value in os.environ.items() if name not in _KEPT}
            | {"PYTHONPATH": str(ROOT)},
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @cached_property
    def address(self) -> str:
        """Where it listens; waits until it does."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("serving "):
                return line.split("http://")[-1].strip()
        raise AssertionError(f"a server did not start: {self.said()}")

    def said(self) -> str:
        """The end of what it wrote to stderr."""
        self._log.seek(0)
        return self._log.read()[-2000:]

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes, str | None]:
        """One request: status, body and `Retry-After`.

        Raises:
            OSError, HTTPException: if it does not answer.
        """
        connection = HTTPConnection(self.address, timeout=ANSWER_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read(), response.getheader("Retry-After")
        finally:
            connection.close()

    def ask(self, prompt: Sequence[int], count: int) -> Answer:
        """`count` tokens behind a prompt, the likeliest ones."""
        body = {"model": "m", "prompt": list(prompt), "max_tokens": count, "temperature": 0, "logprobs": 0}
        status, raw, retry_after = self.call("POST", "/v1/completions", body)
        if status != 200:
            return Answer(status, [], [], {}, retry_after)
        said = json.loads(raw)
        found, cached = said["choices"][0]["logprobs"], said["usage"]["prompt_tokens_details"]
        return Answer(
            status, found["tokens"], found["token_logprobs"], cached["cached_tokens_by_tier"], retry_after
        )

    def boundary(self, prompt: Sequence[int]) -> int:
        """Where a prompt would resume."""
        status, raw, _ = self.call("POST", "/explain", {"model": "m", "prompt": list(prompt)})
        assert status == 200, raw
        return json.loads(raw)["boundary"]

    def number(self, name: str) -> float:
        """One of `/metrics`: its name, with its labels as they are written there."""
        raw = self.call("GET", "/metrics")[1].decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", raw, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def kill(self) -> None:
        """At once, with SIGKILL."""
        self.killed = True
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._log:
            if not self.killed:
                self._process.send_signal(signal.SIGTERM)
            try:
                code = self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                code = self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            assert self.killed or error[0] is not None or code == 0, self.said()


class Turn(NamedTuple):
    """A prompt, and what it makes alone."""

    prompt: list[int]
    alone: Cold


class Model:
    """The servers' model, in this process and with their programs."""

    def __init__(self, folder: Path) -> None:
        parts = split(kda_jax.load(folder))
        sizes = {"nbytes": int(MEMORY_GB * GB), "num_slots": SLOTS + 1, "max_tokens": MAX_TOKENS}
        self.programs = Programs(
            parts, Layout.within(config_of(parts), np.float32, **sizes), most_tokens=BUDGET
        )
        self.folder, self.tokenizer = folder, kda_jax.load_tokenizer(folder)

    def conversation(self, seed: int, turns: int = 2, begun: Sequence[int] = ()) -> list[Turn]:
        """Its turns: each prompt is what was before, what was generated, and more. No token of it is a close call."""
        for attempt in range(10):
            choose, made, prompt = random.Random(f"{seed} {attempt}"), [], list(begun)
            while len(made) < turns:
                prompt += choose.choices(range(256), k=NEXT if made or begun else LENGTH)
                made.append(Turn(list(prompt), cold(prompt, COUNT, self.programs)))
                prompt += made[-1].alone.tokens
            if all(gap(turn.alone) > GAP for turn in made):
                return made
        raise AssertionError("every prompt has tokens that are close calls")

    def check(self, turn: Turn, answer: Answer) -> None:
        """That an answer is what its prompt makes alone: the tokens, and their probabilities."""
        assert answer.status == 200, answer
        logits = np.float64(turn.alone.logits)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert answer.spelled == [self.tokenizer.decode([token]) for token in turn.alone.tokens]
        want = logprobs[np.arange(COUNT), turn.alone.tokens]
        np.testing.assert_allclose(answer.logprobs, want, atol=GAP, rtol=0)


def gap(alone: Cold) -> float:
    """The least difference between a token's logit and the next one's."""
    two = np.sort(alone.logits, axis=1)[:, -2:]
    return float((two[:, 1] - two[:, 0]).min())
