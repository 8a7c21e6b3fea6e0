"""`kda_jax serve` in processes of their own, on loopback, each with a port of its own choice."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

STOP_S = 30.0


@contextmanager
def servers(model: Path, count: int, options: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """Starts servers of a model and stops them again.

    Args:
        model: its folder.
        count: servers.
        options: of `kda_jax serve`.
        folder: for what they say on stderr.

    Yields:
        Their addresses, `127.0.0.1:port`, when all are ready.

    Raises:
        RuntimeError: if one does not start, with the end of what it said.
    """
    command = [sys.executable, "-m", "kda_jax", "serve", str(model), "--port", "0", *options]
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            errors = stack.enter_context(tempfile.NamedTemporaryFile("w+", dir=folder, suffix=".err"))
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            stack.callback(_stop, process)
            started.append((process, errors))
        yield [_address(process, errors) for process, errors in started]


def _address(process: subprocess.Popen[str], errors: IO[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("serving "):
            return line.split("http://")[-1].strip()
    errors.seek(0)
    raise RuntimeError(f"a server did not start: {errors.read()[-2000:] or process.wait()}")


def _stop(process: subprocess.Popen[str]) -> None:
    """Asks it to end, and ends it if it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
