"""`explain`: asks a server where a prompt would resume, and what limits it."""

from __future__ import annotations

import json as json_format
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import typer

from kda_jax.commands.errors import CommandError

TIMEOUT_S = 60


def explain(
    prompt: Annotated[str | None, typer.Argument(help="The prompt, as a completion would get it.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read it from a file.")] = None,
    request: Annotated[
        Path | None, typer.Option(help="The body of a completion or a chat, as json, in place of a prompt.")
    ] = None,
    server: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    key_file: Annotated[Path | None, typer.Option(help="A file that holds the API key.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose prompt it is; takes an operator's key.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all that the server says.")] = False,
) -> None:
    """Ask a server where a prompt would resume, and what limits it."""
    given = [source for source in (prompt, prompt_file, request) if source is not None]
    if len(given) != 1:
        raise CommandError(f"give one prompt: text, --prompt-file or --request; got {len(given)}")
    body = _body(request) if request is not None else {"prompt": prompt}
    if prompt_file is not None:
        body = {"prompt": prompt_file.read_text(encoding="utf-8")}
    if tenant is not None:
        body["tenant"] = tenant
    found = _ask(server, body, None if key_file is None else _key(key_file))
    if json:
        print(json_format.dumps(found, indent=1))
        return
    first, *limits = found["words"]
    print(first)
    for limit in limits:
        print(f"- {limit}")


def _body(file: Path) -> dict[str, Any]:
    try:
        body = json_format.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CommandError(f"{file} is no json file: {error}") from None
    if not isinstance(body, dict):
        raise CommandError(f"{file} must hold a json object, got {type(body).__name__}")
    return body


def _key(file: Path) -> str:
    key = file.read_text(encoding="utf-8").strip()
    if not key.isascii() or len(key.split()) != 1:
        raise CommandError(f"{file} must hold one key and nothing else")
    return key


def _ask(server: str, body: dict[str, Any], key: str | None) -> dict[str, Any]:
    url = f"{server.rstrip('/')}/explain"
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"{server!r} is no address of a server: it begins with http:// or https://")
    headers = {"Content-Type": "application/json"} | (
        {} if key is None else {"Authorization": f"Bearer {key}"}
    )
    try:
        with urlopen(Request(url, json_format.dumps(body).encode(), headers), timeout=TIMEOUT_S) as response:
            found = json_format.load(response)
            return found if "words" in found else _stranger(url)
    except HTTPError as error:
        with error:
            raise CommandError(_message(error)) from None
    except (OSError, HTTPException, ValueError, TypeError) as error:
        raise CommandError(f"no answer from {url}: {getattr(error, 'reason', error)}") from None


def _message(error: HTTPError) -> str:
    try:
        return json_format.load(error)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return f"{error.url} answers {error.code}; is this a server of kda_jax?"


def _stranger(url: str) -> Any:
    raise CommandError(f"{url} says something else; is this a server of kda_jax?")
