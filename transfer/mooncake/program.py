"""The programs that come with Mooncake's package, as child processes that do not outlive this one."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from transfer.errors import Unavailable
from transfer.mooncake.library import remedy

ERROR_LINE = re.compile(r"[EF]\d{4} [\d:.]+ +\d+ \S+\] (.+)")
LEASH = Path(__file__).parent / "leash.py"
# read by the programs: the address they publish, no other transport, less talk
ENVIRONMENT = {
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "MC_FORCE_TCP": "1",
    "MC_LOG_LEVEL": "ERROR",
    "MC_YLT_LOG_LEVEL": "error",
}


def find_program(name: str) -> Path:
    """The file of one of Mooncake's programs, made executable if it is not: some installers drop that bit.

    Raises:
        Unavailable: Mooncake is not installed, or without this program.
    """
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(remedy(ImportError("there is no package mooncake")))
    path = Path(next(iter(spec.submodule_search_locations))) / name
    if not path.is_file():
        raise Unavailable(remedy(ImportError(f"there is no {path}")))
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return path


class Program:
    """One of Mooncake's programs, running. Start it from a thread that lives on: Linux ends it with that thread.

    Args:
        name: `mooncake_master` or `mooncake_client`.
        flags: the program's own, as `--rpc_port=1` is {"rpc_port": 1}.

    Raises:
        Unavailable: it is not there to be run.
    """

    def __init__(self, name: str, flags: dict[str, str | int]) -> None:
        leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid())]
        command = [*leash, str(find_program(name)), *(f"--{flag}={value}" for flag, value in flags.items())]
        self.name = name
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [*command, "--logtostderr", "--minloglevel=1"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # Ctrl-C in a terminal is for this process alone
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ended(self) -> str | None:
        """Says how it ended and its last words, or None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = "" if code == -signal.SIGKILL else self._last_words()
        if "shared libraries" in words:
            words = remedy(ImportError(words))
        return f"{self.name} (process {self.pid}) {how}{words and f': {words}'}"

    def kill(self) -> None:
        """Ends it at once, also if it is stopped, and waits until it is gone. It keeps nothing that it could lose."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _last_words(self) -> str:
        """The last two errors that it logged, without the log's prefix; else its last line, if any."""
        self._log.seek(0)
        lines = [
            line.strip() for line in self._log.read().decode(errors="replace").split("\n") if line.strip()
        ]
        errors = [found[1] for found in map(ERROR_LINE.match, lines) if found]
        return "; ".join(errors[-2:] or lines[-1:])
