"""`bench serve` and `bench engine`: what they ask, what they make of the answers, and that they run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_site import engine

from benchmarks import engine as engine_bench
from benchmarks import serve
from benchmarks.serving.client import Answer, ask, drive
from benchmarks.serving.load import Asked, scaled
from benchmarks.serving.servers import servers
from benchmarks.trace import BLOCK, Request
from cache.retention import Creation

TEXT = np.arange(1000, dtype=np.int32)


def silent(text: str) -> None:
    pass


def test_scaled_prompts_share_what_the_trace_says() -> None:
    one = Request(0.0, 2 * BLOCK + 100, (1, 2), 64)
    two = Request(1.0, 3 * BLOCK + 100, (1, 2, 3), 1)
    first, second = scaled([one, two], TEXT, 32)
    assert (len(first.tokens), len(second.tokens)) == (2 * 16 + 3, 3 * 16 + 3)
    assert first.tokens[:32] == second.tokens[:32] and first.tokens[32:] != second.tokens[32:35]
    assert (first.max_tokens, second.max_tokens) == (2, 2) and 0 <= first.draw != second.draw < 1
    assert scaled([one, two], TEXT, 32) == [first, second]


@pytest.mark.parametrize(
    ("divide", "text"), [(0, TEXT), (3, TEXT), (1, TEXT[:BLOCK])], ids=["0", "3", "text"]
)
def test_a_load_that_cannot_be_made_is_refused(divide: int, text: np.ndarray) -> None:
    with pytest.raises(ValueError, match="must divide 512"):
        scaled([Request(0.0, 10, ())], text, divide)


def chunk(**more: Any) -> str:
    return f"data: {json.dumps({'choices': [{'text': 'x'}], **more})}"


USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4, "cached_tokens_by_tier": {"host": 4}},
}
GOOD = [chunk(usage=None), chunk(usage=None), chunk(choices=[], usage=USAGE), "data: [DONE]"]


@contextmanager
def site(lines: Sequence[str], status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A server whose answer is these lines; and what it was asked."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write("".join(f"{line}\n\n" for line in lines).encode())

        def log_message(self, *message: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", bodies
        server.shutdown()


def test_an_answer_is_read_from_its_stream() -> None:
    with site(GOOD) as (address, bodies):
        answer = ask(address, "m", Asked([1, 2], 5, 0.0))
    assert (answer.prompt_tokens, answer.cached, answer.completion_tokens) == (7, {"host": 4}, 3)
    assert answer.first_s > 0 and answer.later_s >= 0
    assert bodies[0]["prompt"] == [1, 2] and bodies[0]["max_tokens"] == 5 and bodies[0]["temperature"] == 0


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        (["busy"], 429, "429: busy"),
        ([chunk(), f"data: {json.dumps({'error': {'message': 'no more'}})}"], 200, "no more"),
        (GOOD[:2], 200, "ended before its usage"),
    ],
    ids=["refused", "failed", "cut short"],
)
def test_an_answer_that_is_none_is_an_error(lines: list[str], status: int, words: str) -> None:
    with site(lines, status) as (address, _), pytest.raises(RuntimeError, match=words):
        ask(address, "m", Asked([1], 5, 0.0))


def test_each_request_goes_where_it_was_drawn() -> None:
    load, done = [Asked([number], 5, draw) for number, draw in enumerate([0.0, 0.9, 0.4])], []
    with site(GOOD) as (first, to_first), site(GOOD) as (second, to_second):
        answers, seconds = drive([first, second], "m", load, 2, done.append)
    assert len(answers) == 3 and seconds > 0 and sorted(done) == [1, 2, 3]
    assert sorted(body["prompt"][0] for body in to_first) == [0, 2]
    assert [body["prompt"] for body in to_second] == [[1]]


def test_what_answers_come_to() -> None:
    answers = [Answer(30, {"host": 10, "device": 5}, 5, 0.1, 0.02), Answer(70, {"host": 10}, 1, 0.3, 0.0)]
    figures = serve.figures(answers, 2.0)
    assert figures["recomputed"] == 0.75 and figures["restored"] == {"host": 20, "device": 5}
    assert figures["tokens_per_s"] == 53 and figures["first_p50_ms"] == pytest.approx(200)
    assert figures["later_p50_ms"] == pytest.approx(20), "of those with more than one token"


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such path"):
        with servers(tmp_path / "nowhere", 1, [], tmp_path):
            pass


def test_servers_are_measured(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "CASES", serve.CASES[1:2])
    file = tmp_path / "out" / "serve.json"
    report = serve.main(file, model=byte_model, requests=6, divide=256, at_once=2)
    assert json.loads(file.read_text()) == report and file.with_suffix(".png").stat().st_size
    [local] = report["results"]
    assert local["cache"] == "local" and local["recomputed"] < 1 and local["restored"].keys() == {"device"}
    assert "1 x cache local" in capsys.readouterr().out


def test_what_is_compared_with_has_no_cache() -> None:
    assert [case.options for case in serve.CASES if case.cache == serve.OFF] == [("--no-cache",)] * 2
    assert not any(case.options for case in serve.CASES if case.cache != serve.OFF)


def test_the_engine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"ROWS": 3, "TURNS": 3, "NEW": 4, "VOCAB": 60}.items():
        monkeypatch.setattr(engine_bench, name, size)
    with engine() as on, engine(creation=Creation(kinds=frozenset())) as off:
        turn = engine_bench.last_turn(on, off, 300, 1, silent)
        cached = on.statistics().restored_tokens
        assert turn["tokens"] > 200 and turn["ratio"] > 0 and cached and not off.statistics().restored_tokens
        speed = engine_bench.decode(on, off, 8, 1, silent)
        assert speed["ratio"] == speed["with_tokens_per_s"] / speed["without_tokens_per_s"]
        side = engine_bench.beside(on, 200, 1, silent)
        assert 0 < side["alone_p50_ms"] <= side["alone_p99_ms"] and side["beside_p99_ms"] > 0
