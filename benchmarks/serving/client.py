"""Those who ask: so many at once, each waiting for its answer before it takes the next request."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

from benchmarks.serving.load import Asked

TIMEOUT_S = 300.0


class Answer(NamedTuple):
    """What became of a request.

    Attributes:
        prompt_tokens: of its prompt.
        cached: prompt tokens that were restored, by tier.
        completion_tokens: generated.
        first_s: seconds to its first token.
        later_s: seconds a token behind the first, 0 for a single one.
    """

    prompt_tokens: int
    cached: dict[str, int]
    completion_tokens: int
    first_s: float
    later_s: float


def ask(address: str, model: str, asked: Asked) -> Answer:
    """One request, its answer as a stream.

    Raises:
        RuntimeError: if the server refuses it, or its stream ends with an error or too early.
        OSError: if there is no server.
    """
    body = {
        "model": model,
        "prompt": asked.tokens,
        "max_tokens": asked.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, last, usage = time.perf_counter(), None, 0.0, None
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read().decode()}")
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            last = time.perf_counter()
            first = first or last
            usage = chunk.get("usage") or usage
    finally:
        connection.close()
    if usage is None or first is None:
        raise RuntimeError("the stream ended before its usage")
    completion = usage["completion_tokens"]
    cached = usage["prompt_tokens_details"].get("cached_tokens_by_tier", {})
    later = (last - first) / (completion - 1) if completion > 1 else 0.0
    return Answer(usage["prompt_tokens"], cached, completion, first - began, later)


def drive(
    addresses: Sequence[str],
    model: str,
    load: Sequence[Asked],
    at_once: int,
    on_answer: Callable[[int], None],
) -> tuple[list[Answer], float]:
    """Asks all requests in their order, `at_once` at a time; who is asked is part of each request.

    Returns:
        The answers in order, and the seconds that all took.

    Raises:
        RuntimeError, OSError: as `ask`.
    """
    done = count(1)

    def one(asked: Asked) -> Answer:
        answer = ask(addresses[int(asked.draw * len(addresses))], model, asked)
        on_answer(next(done))
        return answer

    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        answers = list(threads.map(one, load))
    return answers, time.perf_counter() - began
