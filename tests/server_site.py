"""A server of the product in a thread of the test, on a free port of loopback."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from typing import Any, NamedTuple

from openai import OpenAI

from kda_jax.server import Keys, Limits, Serving
from kda_jax.server.backend import Backend
from kda_jax.server.run import Server
from kda_jax.tokenizer import ByteCodec, Tokenizer

SPECIAL = {"<bos>": 256, "<eos>": 257, "<user>": 258, "<assistant>": 259}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role if m.role in ('user', 'assistant') else 'user' }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
START_S = 20


def byte_tokenizer(bos: bool = False) -> Tokenizer:
    """A token a byte; a chat is its messages, each behind the token of its role."""
    return Tokenizer(ByteCodec(), SPECIAL, bos="<bos>" if bos else None, eos="<eos>", chat_template=TEMPLATE)


class Answered(NamedTuple):
    """A response: its status, headers (names in lower case) and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Site(NamedTuple):
    """A server that runs; what is closed with it is in `closing`."""

    serving: Serving
    server: Server
    port: int
    closing: ExitStack

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> OpenAI:
        """OpenAI's client, which does not try again."""
        client = OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)
        return self.closing.enter_context(client)

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> Answered:
        """One request; a body that is no bytes goes as json."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answered(response.status, found, response.read())
        finally:
            connection.close()


@contextmanager
def running(
    engine: Backend,
    *,
    limits: Limits | None = None,
    keys: Keys | None = None,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 260,
    context: int = 2000,
) -> Iterator[Site]:
    """A server of an engine, stopped at the end."""
    serving = Serving(
        engine,
        tokenizer or byte_tokenizer(),
        name="tiny",
        vocab_size=vocab_size,
        context=context,
        limits=limits,
        keys=keys,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(serving)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + START_S
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        assert server.started
        try:
            with ExitStack() as closing:
                yield Site(serving, server, listener.getsockname()[1], closing)
        finally:
            server.should_exit = True
            thread.join(START_S)
            assert not thread.is_alive()


def soon(true: Any, within: float = 10.0) -> bool:
    """Whether something becomes true."""
    deadline = time.monotonic() + within
    while not (found := true()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(found)
