"""Everything that a server refuses: the status, the field, and that nothing is left behind."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kda_jax.server import Limits
from server_engine import REFUSALS, EchoEngine
from server_site import Site, running, soon

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture(scope="module")
def site(engine: EchoEngine) -> Iterator[Site]:
    with running(engine, limits=Limits(choices=4, body_nbytes=4096), context=100) as site:
        yield site


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "ab", **fields}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": list(messages) or [HELLO], **fields}


WRONG = [
    (TEXT, b"{", None, "no json"),
    (TEXT, b'{"model": "tiny", "prompt": "\\ud800"}', None, "no json"),
    (TEXT, b"[" * 2000, None, "no json"),
    (TEXT, b"\xff", None, "no json"),
    (TEXT, [], None, "the body"),
    (TEXT, {"prompt": "a"}, "model", "missing"),
    (TEXT, {"model": "tiny"}, "prompt", "missing"),
    (TEXT, text(prompt=""), "prompt", "empty"),
    (TEXT, text(prompt=["a", ""]), "prompt[1]", "empty"),
    (TEXT, text(prompt=[]), "prompt", "token ids"),
    (TEXT, text(prompt=[1, "a"]), "prompt", "token ids"),
    (TEXT, text(prompt=[True]), "prompt", "token ids"),
    (TEXT, text(prompt=[1, 260]), "prompt", "260 is no token, they are 0..259"),
    (TEXT, text(prompt=[-1]), "prompt", "-1"),
    (TEXT, text(prompt=[10**30]), "prompt", "is no token"),
    (TEXT, text(prompt="x" * 100), "prompt", "100 tokens"),
    (TEXT, text(max_tokens=0), "max_tokens", "greater than or equal to 1, got 0"),
    (TEXT, text(max_tokens="5"), "max_tokens", "integer, got '5'"),
    (TEXT, text(max_tokens=99), "max_tokens", "room for 98"),
    (TEXT, text(temperature=-0.1), "temperature", "-0.1"),
    (TEXT, b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "temperature", "inf"),
    (TEXT, text(top_p=0), "top_p", "greater than 0"),
    (TEXT, text(top_k=0), "top_k", "1"),
    (TEXT, text(min_p=2), "min_p", "1"),
    (TEXT, text(seed=2**63), "seed", "less than"),
    (TEXT, text(n=0), "n", "1"),
    (TEXT, text(n=3, prompt=["a", "b"]), "n", "3 continuations of 2 prompts; all together may be 4"),
    (TEXT, text(stop=[""]), "stop", "none of them empty"),
    (TEXT, text(stop=7), "stop", "text"),
    (TEXT, text(logprobs=21), "logprobs", "20"),
    (TEXT, text(stream=1), "stream", "boolean"),
    (TEXT, text(stream_options={"usage": True}), "stream_options.usage", "not known here; leave it out"),
    (TEXT, text(temperatur=1), "temperatur", "not known here; leave it out"),
    (TEXT, text(suffix="x"), "suffix", "not supported"),
    (TEXT, text(logit_bias={"5": 1}), "logit_bias", "not supported"),
    (TEXT, text(presence_penalty=0.5), "presence_penalty", "0"),
    (CHAT, chat(messages=[]), "messages", "at least 1"),
    (CHAT, chat({"role": "robot", "content": "x"}), "messages[0].role", "'user'"),
    (CHAT, chat(HELLO, {"content": "x"}), "messages[1].role", "missing"),
    (CHAT, chat({"role": "user", "content": 5}), "messages[0].content", "text"),
    (CHAT, chat({"role": "user", "content": [{"type": "image_url"}]}), "messages[0].content", "no other"),
    (CHAT, chat({"role": "user", "content": "x" * 99}), "messages", "101 tokens"),
    (CHAT, chat(max_completion_tokens=97), "max_completion_tokens", "room for 93"),
    (CHAT, chat(top_logprobs=21), "top_logprobs", "20"),
    (CHAT, chat(tools=[{}]), "tools", "not supported"),
    (CHAT, chat(prompt="x"), "prompt", "not known here"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format", "not supported unless"),
    ("/explain", {}, "prompt", "give a prompt"),
    ("/explain", text(messages=[HELLO]), "prompt", "not both"),
    ("/explain", text(prompt=["a", "b"]), "prompt", "one at a time"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    WRONG,
    ids=[f"{case[0].split('/')[-1]}-{case[2]}-{number}" for number, case in enumerate(WRONG)],
)
def test_bad_input_names_the_field(
    site: Site, engine: EchoEngine, path: str, body: Any, param: str | None, words: str
) -> None:
    before = len(engine.submitted)
    answer = site.ask("POST", path, body)
    error = answer.json["error"]
    assert answer.status == 400 and error["type"] == "invalid_request_error", error
    assert error["param"] == param and words in error["message"], error
    assert param is None or error["message"].startswith(param), error
    assert len(engine.submitted) == before and len(site.serving.live) == 0


def test_the_client_raises_them_by_kind(site: Site) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens") as bad:
        site.client().completions.create(model="tiny", prompt="a", max_tokens=0)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        site.client().completions.create(model="gpt", prompt="a")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"


@pytest.mark.parametrize(
    "fields", [{"echo": False, "best_of": 1, "user": "u", "logit_bias": None}, {"suffix": ""}]
)
def test_fields_that_ask_for_nothing_are_taken(site: Site, fields: dict) -> None:
    fields |= {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "seed": None,
        "stop": None,
        "stream_options": None,
    }
    assert site.ask("POST", TEXT, text(max_tokens=1, **fields)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2", 404),
        ("GET", "/v1/models/x/y", 404),
        ("GET", TEXT, 405),
        ("DELETE", "/health", 405),
        ("POST", f"{TEXT}/", 404),
    ],
)
def test_other_paths(site: Site, method: str, path: str, status: int) -> None:
    answer = site.ask(method, path)
    assert answer.status == status and answer.json["error"]["message"]
    assert status == 404 or "allow" in answer.headers


def curl(site: Site, *lines: str, body: bytes = b"") -> bytes:
    """What is answered to a request that is written out."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=20) as connection:
        head = "\r\n".join([*lines, "Host: x", "Connection: close", f"Content-Length: {len(body)}", "", ""])
        connection.sendall(head.encode() + body)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_unusual_requests(site: Site) -> None:
    """What is legal is taken: no content type, another one, no content; what is not says why."""
    asked = json.dumps(text(max_tokens=1, stop=["x"])).encode()
    for line in ("Accept: */*", "Content-Type: text/plain", "Content-Encoding: identity"):
        assert curl(site, f"POST {TEXT} HTTP/1.1", line, body=asked).startswith(b"HTTP/1.1 200")
    packed = curl(site, f"POST {TEXT} HTTP/1.1", "Content-Encoding: gzip", body=gzip.compress(asked))
    assert packed.startswith(b"HTTP/1.1 415") and b"got 'gzip'" in packed
    assert curl(site, "HEAD /health HTTP/1.1").endswith(b"\r\n\r\n")
    for messages in ([{"role": "user", "content": ""}], [{"role": "assistant"}, HELLO]):
        assert site.ask("POST", CHAT, chat(*messages, max_tokens=1)).status == 200
    plain = chat(max_tokens=1, response_format={"type": "text"})
    assert site.ask("POST", CHAT, plain).status == 200


def test_a_body_that_is_too_large(site: Site) -> None:
    with pytest.raises(openai.APIStatusError, match="larger than 4096 bytes") as large:
        site.client().completions.create(model="tiny", prompt="x" * 60_000)
    assert large.value.status_code == 413
    assert site.ask("GET", "/health").status == 200


def test_a_body_that_never_ends_is_given_up_early(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        connection.sendall(b"x" * 16 * 4096 + b"x")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come() -> None:
    with (
        running(EchoEngine(), limits=Limits(body_s=0.1)) as site,
        socket.create_connection(("127.0.0.1", site.port), timeout=10) as connection,
    ):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        ("overloaded", 429, "overloaded"),
        ("refused", 400, "context_length_exceeded"),
        ("closed", 503, "closed"),
        ("invalid", 400, None),
    ],
)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_what_the_engine_refuses(refusal: str, status: int, code: str, streams: bool) -> None:
    engine = EchoEngine()
    engine.error = REFUSALS[refusal]
    with running(engine, limits=Limits(retry_s=3)) as site:
        answer = site.ask("POST", TEXT, text(stream=streams))
        assert (answer.status, answer.json["error"]["code"]) == (status, code)
        assert answer.headers.get("retry-after") == ("3" if status in (429, 503) else None)
        assert len(site.serving.live) == 0


def test_what_was_begun_ends_if_the_rest_is_refused() -> None:
    engine = EchoEngine()
    engine.hold.clear()
    submit = engine.submit

    def second_time_never(*given: Any, **named: Any) -> Any:
        stream = submit(*given, **named)
        engine.error = REFUSALS["overloaded"]
        return stream

    engine.submit = second_time_never
    with running(engine) as site:
        assert site.ask("POST", TEXT, text(n=2, max_tokens=9)).status == 429
        assert soon(lambda: engine.cancelled == [0]) and len(site.serving.live) == 0


def test_too_many_requests_at_once() -> None:
    engine = EchoEngine()
    engine.hold.clear()
    with running(engine, limits=Limits(requests=1)) as site:
        stream = site.client().completions.create(model="tiny", prompt="ab", max_tokens=9, stream=True)
        next(stream)
        with pytest.raises(openai.RateLimitError, match="1 requests are being served") as busy:
            site.client().completions.create(model="tiny", prompt="ab")
        assert busy.value.response.headers["retry-after"] == "1"
        stream.close()
        engine.hold.set()
        assert soon(lambda: len(site.serving.live) == 0)
        assert site.client().completions.create(model="tiny", prompt="ab", max_tokens=1)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_request_that_fails_or_takes_too_long(streams: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = EchoEngine()
    with running(engine, limits=Limits(request_s=0.05)) as site:
        for fails, status, words in (
            (True, 500, "the engine failed at this request"),
            (False, 504, "0.05 s"),
        ):
            engine.fails = fails
            engine.hold.clear()
            answer = site.ask("POST", TEXT, text(max_tokens=9, stream=streams))
            if streams:
                *_, last, nothing = answer.body.decode().split("\n\n")
                assert nothing == "" and last.startswith('data: {"error"') and words in last
            else:
                assert answer.status == status and words in answer.json["error"]["message"]
            assert b"the test said so" not in answer.body
            assert soon(lambda: len(site.serving.live) == 0)
    assert caplog.text.count("the test said so") == 1


def test_an_error_of_the_servers_own_is_told_without_details(caplog: pytest.LogCaptureFixture) -> None:
    engine = EchoEngine()
    engine.error = RuntimeError("secret")
    with running(engine) as site:
        answer = site.ask("POST", TEXT, text())
    assert answer.status == 500 and answer.json["error"]["code"] == "internal"
    assert b"secret" not in answer.body and caplog.text.count("RuntimeError: secret") == 1


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    engine = EchoEngine()
    engine.hold.clear()
    with running(engine) as site:
        stream = site.client().completions.create(
            model="tiny", prompt="ab", max_tokens=4, seed=0, stream=True
        )
        begun = next(stream).choices[0].text
        site.server.handle_exit(signal.SIGTERM, None)
        answer = site.ask("POST", TEXT, text())
        assert answer.status == 503 and answer.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            site.client().completions.create(model="tiny", prompt="ab")
        assert site.ask("GET", "/health").status == 503
        engine.hold.set()
        assert begun + "".join(chunk.choices[0].text for chunk in stream) == "abab"
        assert soon(lambda: site.server.should_exit)
    assert site.server.all_finished


def test_draining_ends_what_does_not_finish() -> None:
    engine = EchoEngine()
    engine.hold.clear()
    with running(engine, limits=Limits(drain_s=0.05)) as site:
        stream = site.client().completions.create(model="tiny", prompt="ab", max_tokens=4, stream=True)
        next(stream)
        whole: list[Any] = []
        other = threading.Thread(target=lambda: whole.append(site.ask("POST", TEXT, text(max_tokens=9))))
        other.start()
        assert soon(lambda: len(engine.live) == 2)
        site.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        other.join()
        assert whole[0].status == 503
    assert not site.server.all_finished


def test_an_engine_that_failed_is_no_healthy_server(caplog: pytest.LogCaptureFixture) -> None:
    """What it failed of is for the log, and there once."""
    engine = EchoEngine()
    with running(engine) as site:
        assert site.ask("GET", "/health").json == {"status": "ok"}
        engine.closed = "the engine failed: OSError: /secret/path"
        for method, path, body in (("GET", "/health", None), ("POST", TEXT, text()), ("POST", CHAT, chat())):
            answer = site.ask(method, path, body)
            assert answer.status == 503 and answer.json["error"]["code"] == "closed"
            assert answer.json["error"]["message"] == "the engine has failed, or was stopped"
            assert answer.headers["retry-after"] == "1"
    assert caplog.text.count("/secret/path") == 1


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="requests=0 must be above 0"):
        Limits(requests=0)
    with pytest.raises(ValueError, match="unread_s=-1"):
        Limits(unread_s=-1.0)
    with pytest.raises(ValueError, match="bodies_nbytes=5 must be at least body_nbytes=6"):
        Limits(bodies_nbytes=5, body_nbytes=6)


def test_a_second_signal_stops_at_once_and_says_that_not_all_have_finished() -> None:
    engine = EchoEngine()
    engine.hold.clear()
    with running(engine) as site:
        stream = site.client().completions.create(model="tiny", prompt="ab", max_tokens=4, stream=True)
        next(stream)
        site.server.handle_exit(signal.SIGTERM, None)
        assert not site.server.should_exit
        site.server.handle_exit(signal.SIGTERM, None)
        assert site.server.should_exit and not site.server.all_finished
        engine.hold.set()
        stream.close()
