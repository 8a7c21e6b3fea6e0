"""Prompts under overload: what is sure to be refused is not read, and reading never stops the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kda_jax.server import Limits
from kda_jax.server.door import Door
from kda_jax.server.errors import ApiError
from kda_jax.server.live import too_many
from server_engine import REFUSALS, EchoEngine
from server_site import Site, running, soon

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def site(engine: EchoEngine) -> Iterator[Site]:
    with running(engine, limits=Limits(retry_s=60)) as site:
        yield site


def body(path: str, length: int, **fields: Any) -> dict[str, Any]:
    text = "x" * length
    asked = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    return {"model": "tiny", "max_tokens": 2, **asked, **fields}


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_what_is_sure_to_be_refused_is_not_read(
    site: Site, engine: EchoEngine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, read = site.serving.tokenizer, []
    name = "encode" if path == TEXT else "apply_chat_template"
    known = getattr(tokenizer, name)
    monkeypatch.setattr(tokenizer, name, lambda given: read.append(given) or known(given))

    def asked(length: int, **fields: Any) -> tuple[int, int]:
        """Status, and whether the prompt was read."""
        before = len(read)
        answer = site.ask("POST", path, body(path, length, **fields))
        assert answer.status == 200 or answer.headers["retry-after"] == "60"
        return answer.status, len(read) - before

    assert asked(50) == (200, 1)
    engine.error = REFUSALS["overloaded"]
    assert asked(50, n=2) == (429, 1) and asked(50) == (429, 1), "two are more than one"
    assert asked(50) == asked(70) == (429, 0)
    assert asked(49) == (429, 1), "a shorter one may fit"
    assert asked(49) == (429, 0)
    engine.error = None
    assert asked(20) == (200, 1)
    assert asked(70) == (200, 1), "something has ended, so there may be room"


def test_a_first_token_makes_room(site: Site, engine: EchoEngine) -> None:
    engine.hold.clear()
    stream = site.client().completions.create(model="tiny", prompt="a", max_tokens=9, stream=True)
    next(stream)
    engine.error = REFUSALS["overloaded"]
    assert site.ask("POST", TEXT, body(TEXT, 50)).status == 429
    engine.error = None
    assert site.ask("POST", TEXT, body(TEXT, 50)).status == 429
    other = site.client().completions.create(model="tiny", prompt="a", max_tokens=9, stream=True)
    next(other)
    engine.hold.set()
    assert site.ask("POST", TEXT, body(TEXT, 50)).status == 200
    other.close()
    stream.close()


def test_a_refusal_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    door = Door(3)

    def told(kind: str, length: int, error: ApiError | None = None) -> bool:
        """Whether it is let in."""
        let_in = False
        try:
            with door.passing(kind, length):
                let_in = True
                if error is not None:
                    raise error
        except ApiError:
            pass
        return let_in

    assert told("text", 10, ApiError(400, "wrong")) and told("text", 10)
    assert told("text", 10, too_many("full", 3)) and told("several", 0, too_many("full", 3))
    assert not told("text", 10) and told("text", 9) and told("tokens", 10) and told("several", 0)
    now[0] = 103.0
    assert told("text", 10)


def test_reading_is_done_aside_and_by_a_few(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    go, tokenizer, reading = threading.Event(), site.serving.tokenizer, []
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text: reading.append(text) or (go.wait(20) and encode(text))
    )
    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(site.ask, "POST", TEXT, body(TEXT, 9)) for _ in range(5)]
        assert soon(lambda: len(reading) == 2)
        assert site.ask("GET", "/health").status == site.ask("GET", "/live").status == 200
        assert len(reading) == 2
        go.set()
        assert [future.result().status for future in asked] == [200] * 5


def test_what_is_wrong_anyway_is_not_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.serving.tokenizer, "encode", None)
    assert site.ask("POST", TEXT, body(TEXT, 9, n=17)).status == 400
    assert site.ask("POST", TEXT, body(TEXT, 9, model="other")).status == 404
