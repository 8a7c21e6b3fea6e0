"""`serve` and `explain` on the command line, with an engine of the test's in place of the real one."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kda_jax.engine
from kda_jax.commands import run
from kda_jax.server import Keys, Tenant
from server_engine import EchoEngine
from server_site import running, soon

command = importlib.import_module("kda_jax.commands.serve")  # the package's own `serve` is the function in it
KEY = "sk-alice-0123456789"
KEYS = f'[alice]\nkey = "{KEY}"\nsalt = "salt-of-alice-0123"\n'


class Started(EchoEngine):
    """An engine that the command starts and closes."""

    def __init__(self, closed: list[str]) -> None:
        super().__init__()
        self._closing = closed

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.append("engine")


class Run:
    """One run of `serve` in this thread, which must be the main one, and what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[str, Any] = {}
        self.closed: list[str] = []
        self.engine = Started(self.closed)
        monkeypatch.setattr(command, "start", self._start)
        monkeypatch.setattr(command, "keep_compiled", lambda folder: None)

    def _start(self, folder: Path, model: object, **options: Any) -> tuple[Started, str]:
        self.given = {"folder": folder, **options}
        return self.engine, "fp_of_the_test"

    def __call__(self, line: list[str], meet: Callable[[str], None]) -> int:
        """Serves; `meet` is called with the address, in another thread, and a SIGTERM follows it."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        url, wrong = f"http://127.0.0.1:{port}", []

        def visit() -> None:
            try:
                assert soon(lambda: _answers(f"{url}/health"))
                meet(url)
            except BaseException as error:
                wrong.append(error)
            if _answers(f"{url}/health"):  # else nobody would catch it
                os.kill(os.getpid(), signal.SIGTERM)

        visitor = threading.Thread(target=visit)
        visitor.start()
        code = run(["serve", *line, "--port", str(port)])
        visitor.join()
        assert not wrong, wrong
        return code


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def ask(url: str, body: Any, key: str | None = None) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)


def test_serve(byte_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    serve, found = Run(monkeypatch), []
    body = {"model": "bytes", "prompt": "ab", "max_tokens": 3, "seed": 0}
    code = serve([str(byte_model)], lambda url: found.append(ask(f"{url}/v1/completions", body)))
    assert code == 0 and serve.closed == ["engine"]
    assert found[0]["system_fingerprint"] == "fp_of_the_test"
    assert serve.engine.submitted[0]["tokens"] == [256, 97, 98]  # this model opens texts with a token
    assert serve.given == {
        "folder": byte_model,
        "max_tokens": 4096,
        "slots": 8,
        "nbytes": 2**30,
        "budget": 512,
        "queued": 1_000_000,
    }
    out, err = capsys.readouterr()
    assert out.startswith("serving bytes on http://127.0.0.1:")
    assert err == "kda_jax: no --keys: whoever reaches 127.0.0.1 is let in, and all share one cache\n"


def test_serves_options(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!")
    serve, found = Run(monkeypatch), []
    line = f"--name m --keys {tmp_path}/keys.toml --store disk:{tmp_path}/near --queued 500"
    line += " --host-gb 0.25 --memory-gb 0.125 --slots 3 --max-tokens 100 --budget 64 --lookup 4 --timeout 7"
    line += f" --chat-template {tmp_path}/chat.jinja"

    def meet(url: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "ab"}]}
        found.append(ask(f"{url}/v1/chat/completions", body, KEY))
        assert not _answers(f"{url}/live")

    assert serve([str(byte_model), *line.split()], meet) == 0
    assert found[0]["usage"]["completion_tokens"] == 97  # what is left of 100
    assert serve.engine.submitted[0]["tokens"] == [*b"ab!"]
    assert serve.engine.submitted[0]["tenant"] == "salt-of-alice-0123"
    assert serve.engine.submitted[0]["timeout"] == 7.0
    assert serve.given.pop("disk") is not None and (tmp_path / "near").is_dir()
    sizes = {"max_tokens": 100, "slots": 3, "nbytes": 2**27, "budget": 64, "queued": 500, "lookup": 4}
    sizes |= {"host_nbytes": 2**28}
    assert serve.given == {"folder": byte_model, **sizes}
    assert capsys.readouterr().err == ""


def test_without_a_cache_no_checkpoint_is_made(byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Run(monkeypatch)
    assert serve([str(byte_model), "--no-cache"], lambda url: None) == 0
    assert serve.given["creation"].kinds == frozenset()


def test_sigterm_lets_requests_finish_or_says_so(
    byte_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve, ended = Run(monkeypatch), []
    serve.engine.hold.clear()

    def wait(url: str) -> None:
        try:
            ask(f"{url}/v1/completions", {"model": "bytes", "prompt": "ab", "max_tokens": 9})
        except urllib.error.HTTPError as error:
            with error:
                ended.append((error.code, json.load(error)["error"]["code"]))

    def meet(url: str) -> None:
        waiter = threading.Thread(target=wait, args=(url,))
        waiter.start()
        assert soon(lambda: len(serve.engine.live) == 1)

    assert serve([str(byte_model), "--drain", "0.1"], meet) == 0
    assert soon(lambda: ended == [(503, "draining")])
    assert capsys.readouterr().err.endswith("kda_jax: stopped before every request had finished\n")


def test_what_an_engine_is_started_with(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, folder = [], tmp_path / "model"
    shutil.copytree(byte_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 257}))
    monkeypatch.setattr(kda_jax.engine, "Engine", lambda model, **options: given.append(options))
    for dtype in ("float32", "bfloat16"):
        command.start(folder, kda_jax.load(folder, dtype=dtype), slots=2)
    first, second = (each.pop("namespace") for each in given)
    assert first.weights == second.weights and first.tokenizer == second.tokenizer
    assert (first.quantisation, second.quantisation) == ("float32", "bfloat16")  # which compute other states
    assert given[0]["slots"] == 2 and list(given[0]["stop_tokens"]) == [257]


MISTAKES = [
    ("serve nowhere", "no such path: nowhere"),
    ("serve MODEL --keys nowhere.toml", "nowhere.toml"),
    ("serve MODEL --keys TMP/keys.toml", "names no tenant"),
    ("serve MODEL --store tape:x", "'tape:x' names no store"),
    (
        "serve MODEL --store disk:TMP/a --store disk:TMP/b",
        "give at most one disk:FOLDER or mooncake:HOST:PORT",
    ),
    ("serve MODEL --no-cache --store disk:TMP/a", "--no-cache keeps nothing"),
    ("serve MODEL --no-cache --host-gb 1", "--no-cache keeps nothing"),
    ("serve MODEL --body-mb 9 --bodies-mb 8", "--bodies-mb 8 has no room for one body of --body-mb 9"),
    ("serve MODEL --chat-template nowhere.jinja", "nowhere.jinja"),
    ("serve MODEL --port BUSY", "cannot listen on 127.0.0.1"),
    ("explain", "give one prompt"),
    ("explain x --prompt-file TMP/keys.toml", "give one prompt"),
    ("explain x --server localhost", "begins with http"),
    ("explain x --server http://127.0.0.1:FREE", "no answer from http://127.0.0.1"),
    ("explain --request TMP/keys.toml", "is no json file"),
    ("explain --request TMP/list.json", "must hold a json object, got list"),
    ("explain x --server SITE/nowhere", "no /nowhere/explain here"),
    ("explain x --server SITE --key-file TMP/list.json", "no key that this server takes"),
    ("explain x --server SITE --key-file TMP/key --tenant bob", "takes the key of an operator"),
    ("explain x --server SITE --key-file TMP/keys", "must hold one key and nothing else"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_line(
    byte_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    words: str,
) -> None:
    Run(monkeypatch)
    (tmp_path / "keys.toml").write_text("")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "keys").write_text(f"{KEY}\n{KEY}\n")
    keys = Keys({KEY: Tenant("alice", "salt", False)})
    with socket.create_server(("127.0.0.1", 0)) as busy, running(EchoEngine(), keys=keys) as site:
        with socket.create_server(("127.0.0.1", 0)) as freed:
            free = freed.getsockname()[1]
        places = {
            "MODEL": byte_model,
            "TMP": tmp_path,
            "BUSY": busy.getsockname()[1],
            "FREE": free,
            "SITE": site.url,
        }
        for name, place in places.items():
            line = line.replace(name, str(place))
        assert run(line.split()) == 1
    err = capsys.readouterr().err
    assert words in err and err.splitlines()[-1].startswith("kda_jax: ") and "Traceback" not in err
    assert KEY not in err


def test_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = Keys({KEY: Tenant("alice", "salt", False)})
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "prompt").write_text("abc")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    with running(EchoEngine(), keys=keys) as site:
        asked = ["--server", site.url, "--key-file", str(tmp_path / "key")]
        site.client(KEY).completions.create(model="tiny", prompt="abc", max_tokens=1)
        assert (
            run(["explain", "abc", *asked])
            == run(["explain", "--prompt-file", f"{tmp_path}/prompt", *asked])
            == 0
        )
        text = "2 of 3 tokens would be restored (2 from device; state from device)\n- the checkpoint at 2 tokens "
        assert capsys.readouterr().out.count(text) == 2
        assert (
            run(["explain", "--request", f"{tmp_path}/chat.json", "--json", "--tenant", "alice", *asked]) == 0
        )
        assert json.loads(capsys.readouterr().out)["tokens"] == 3
