"""Clients that do not read, and clients that do not write: what they hold is bounded, and so is how long."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep as pause
from typing import Any

import pytest

from kda_jax.server import Limits
from server_engine import EchoEngine
from server_site import Site, running, soon

TEXT = "/v1/completions"
LONG = 200_000
"""Tokens that take much longer to make than anything here waits for."""


@contextmanager
def asking(
    site: Site, nbytes: int | None, head: str = "", sent: bytes = b"", path: str = TEXT
) -> Iterator[socket.socket]:
    """A connection on which a request's head was sent, that announces a body, and some of the body; it is in chunks if
    it does not say how long it is."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", site.port))
        length = "Transfer-Encoding: chunked" if nbytes is None else f"Content-Length: {nbytes}"
        lines = f"POST {path} HTTP/1.1\r\nHost: x\r\n{length}\r\n{head}\r\n"
        connection.sendall(lines.encode() + sent)
        yield connection


def posted(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "ab", **fields}).encode()


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_who_does_not_read_is_hung_up_on(streams: bool) -> None:
    """A stream is ended in its midst; of a whole answer nothing is kept."""
    engine = EchoEngine()
    body = posted(max_tokens=LONG if streams else 1200, logprobs=20, stream=streams)
    with running(engine, limits=Limits(unread_s=0.3, requests=1), context=10 * LONG) as site:
        with asking(site, len(body), sent=body):
            assert soon(lambda: engine.submitted)
            assert site.ask("POST", TEXT, posted()).status == 429, "it has the only place"
            assert soon(lambda: not site.server.server_state.connections)
            assert soon(lambda: not engine.live) and len(engine.cancelled) == streams
            assert site.ask("POST", TEXT, posted(max_tokens=1)).status == 200


def test_who_reads_slowly_gets_all() -> None:
    """Longer than a client may take nothing, but never nothing for so long."""
    body = posted(max_tokens=800, logprobs=20)
    with running(EchoEngine(), limits=Limits(unread_s=1.0)) as site:
        with asking(site, len(body), head="Connection: close\r\n", sent=body) as connection:
            got = b""
            while part := connection.recv(50_000):
                got += part
                pause(0.02)
    head, _, text = got.partition(b"\r\n\r\n")
    assert b"200 OK" in head and json.loads(text)["usage"]["completion_tokens"] == 800


@pytest.mark.parametrize(
    "begun", [(8000, b"{"), (None, b"1f40\r\n" + b"x" * 8000 + b"\r\n")], ids=["announced", "chunks"]
)
@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions", "/explain"])
def test_bodies_that_are_read_at_once_are_bounded(begun: tuple[int | None, bytes], path: str) -> None:
    nbytes, sent = begun
    engine, other = EchoEngine(), posted(prompt="x" * 3000, max_tokens=1)
    with running(
        engine, limits=Limits(body_nbytes=8000, bodies_nbytes=10_000, retry_s=3), context=9000
    ) as site:
        with asking(site, nbytes, sent=sent, path=path):
            assert soon(lambda: site.serving.bodies.nbytes == 8000)
            answer = site.ask("POST", TEXT, other)
            assert answer.status == 429 and answer.headers["retry-after"] == "3"
            assert "8000 bytes" in answer.json["error"]["message"] and not engine.submitted
            assert site.ask("POST", TEXT, posted(max_tokens=1)).status == 200, "there is room for a small one"
        assert soon(lambda: site.serving.bodies.nbytes == 0)
        assert site.ask("POST", TEXT, other).status == 200


def test_a_body_that_grows_beyond_what_there_is_room_for_is_refused() -> None:
    limits = Limits(body_nbytes=8000, bodies_nbytes=10_000)
    with running(EchoEngine(), limits=limits) as site, asking(site, 8000, sent=b"{"):
        assert soon(lambda: site.serving.bodies.nbytes == 8000)
        with asking(site, None, sent=b"bb8\r\n" + b"x" * 3000) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 429")
        assert soon(lambda: site.serving.bodies.nbytes == 8000)


def test_a_request_that_is_being_read_has_a_place() -> None:
    with running(EchoEngine(), limits=Limits(requests=1)) as site:
        with asking(site, 9, sent=b"{"):
            assert soon(lambda: site.ask("POST", TEXT, posted()).status == 429)
        assert soon(lambda: site.ask("POST", TEXT, posted(max_tokens=1)).status == 200)


def test_a_prompt_counts_among_the_bodies_until_it_is_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer: what runs does not keep its body."""
    engine, seen = EchoEngine(), []
    engine.hold.clear()
    with running(engine) as site:
        encode = site.serving.tokenizer.encode
        monkeypatch.setattr(
            site.serving.tokenizer,
            "encode",
            lambda text: seen.append(site.serving.bodies.nbytes) or encode(text),
        )
        body = posted(stream=True, metadata={"much": "x" * 500})
        with asking(site, len(body), sent=body) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            assert seen == [len(body)] and site.serving.bodies.nbytes == 0


def test_a_body_that_is_announced_much_too_large_is_not_waited_for() -> None:
    with running(EchoEngine(), limits=Limits(body_nbytes=100)) as site, asking(site, 1_000_000) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
        assert ended(connection)


def ended(connection: socket.socket) -> bool:
    """Whether the other side closes a connection, which is read to its end, before a test has no more time."""
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("nbytes", [9000, None], ids=["announced", "chunks"])
def test_a_body_that_trickles_in_has_a_deadline(nbytes: int | None) -> None:
    piece = b"1\r\nx\r\n" if nbytes is None else b"x"
    with running(EchoEngine(), limits=Limits(body_s=0.3)) as site, asking(site, nbytes) as connection:
        connection.setblocking(False)
        got = b""
        for _ in range(400):
            connection.send(piece)
            pause(0.01)
            try:
                got = connection.recv(100)
                break
            except BlockingIOError:
                continue
        assert got.startswith(b"HTTP/1.1 408")
        connection.settimeout(20)
        assert ended(connection)


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_who_asks_nothing_more_is_hung_up_on(said: bytes) -> None:
    with running(EchoEngine(), limits=Limits(body_s=0.2)) as site:
        with socket.create_connection(("127.0.0.1", site.port), timeout=20) as connection:
            connection.sendall(said)
            assert ended(connection)


def test_the_rest_of_a_body_that_nobody_reads_has_a_deadline() -> None:
    with running(EchoEngine(), limits=Limits(body_s=0.3)) as site:
        with asking(site, 100_000, path="/v1/nothing") as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 404")
            with pytest.raises(OSError):
                for _ in range(1000):
                    connection.sendall(b"x")
                    pause(0.01)
