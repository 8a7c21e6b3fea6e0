"""`python -m transfer up` and LocalMooncake: ready when it says so, nothing left when it ends, however it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

import pytest

from transfer import Unavailable
from transfer.__main__ import run
from transfer.mooncake import program
from transfer.mooncake.local import LocalMooncake

UP = [sys.executable, "-m", "transfer", "up", "--json", "--segment-mb", "16"]
SMALL = {"segment_bytes": 16 << 20, "lease_ms": 200, "client_ttl_s": 3}
TIMEOUT_S = 30


started: list[int] = []


@pytest.fixture(autouse=True)
def leftovers() -> Iterator[None]:
    """Of a test that fails."""
    started.clear()
    yield
    for pid in filter(alive, started):
        os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def wait_for(happened: Callable[[], bool], timeout: float = TIMEOUT_S) -> bool:
    end = monotonic() + timeout
    while not happened() and monotonic() < end:
        sleep(0.02)
    return happened()


def is_served(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def start(*command: str) -> tuple[subprocess.Popen[str], dict]:
    """`up`, or what starts it, and what it printed."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    facts = json.loads(process.stdout.readline())
    started.extend([process.pid, facts["master_pid"], facts["store_pid"]])
    return process, facts


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and what it wrote to stderr."""
    _, said = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_stops_all(number: signal.Signals) -> None:
    process, facts = start(*UP)
    assert is_served(facts["address"]) and is_served(urlsplit(facts["metrics"]).netloc)
    assert facts["segment_mb"] == 16 and facts["lease_ms"] == 10_000
    assert alive(facts["master_pid"]) and alive(facts["store_pid"])
    os.killpg(process.pid, number)  # as a terminal does
    assert end(process) == (-9 if number == signal.SIGKILL else 0, "")
    assert wait_for(lambda: not alive(facts["master_pid"]) and not alive(facts["store_pid"]))


def test_the_end_of_the_parent_stops_all() -> None:
    parent, facts = start(sys.executable, "-c", f"import subprocess; subprocess.run({UP})")
    up = int(Path(f"/proc/{facts['master_pid']}/stat").read_text().rpartition(") ")[2].split()[1])
    started.append(up)
    assert alive(up)
    parent.kill()
    parent.communicate(timeout=TIMEOUT_S)
    assert wait_for(lambda: not any(map(alive, (up, facts["master_pid"], facts["store_pid"]))))


@pytest.mark.parametrize(
    ("died", "left"), [("master", "store"), ("store", "master")], ids=["master", "store"]
)
def test_if_one_dies_the_other_is_stopped_and_a_line_says_why(died: str, left: str) -> None:
    process, facts = start(*UP)
    os.kill(facts[f"{died}_pid"], signal.SIGKILL)
    name = {"master": "mooncake_master", "store": "mooncake_client"}[died]
    line = f"transfer: {name} (process {facts[f'{died}_pid']}) was ended by SIGKILL\n"
    assert end(process) == (1, line)
    assert wait_for(lambda: not alive(facts[f"{left}_pid"]))


def test_in_words() -> None:
    command = [word for word in UP if word != "--json"]
    with subprocess.Popen([*command, "--segment-mb", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(5)]
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
    assert [line[0] for line in lines] == ["address", "metrics", "master", "store", "Ctrl-C"]
    assert lines[3] == ["store", "none"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("up --port x", 2, ["--port", "integer"]),
        ("up --port 70000", 1, ["port", "70000", "65535"]),
        ("up --segment-mb 3", 1, ["at least 16 MiB", str(3 << 20)]),
        ("up --segment-mb -1", 1, ["at least 16 MiB", str(-1 << 20)]),
        ("up --segment-mb 100000000", 1, ["mooncake_client", "allocate segment memory"]),
        ("up --lease-ms 0", 1, ["lease_ms=0"]),
        ("up --what", 2, ["--what"]),
        ("down", 2, ["down"]),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else None,
)
def test_a_mistake_is_one_line(
    capfd: pytest.CaptureFixture[str], arguments: str, code: int, words: list[str]
) -> None:
    assert run(arguments.split()) == code
    printed, said = capfd.readouterr()
    assert printed == "" and said.startswith("transfer: ") and said.count("\n") == 1
    assert [word for word in words if word not in said] == []


def test_a_taken_port_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert run(["up", "--port", str(port)]) == 1
    said = capfd.readouterr().err
    assert f"port {port} of 127.0.0.1" in said and "choose another" in said and said.count("\n") == 1


def test_a_chosen_port_is_used_and_on_loopback_only() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with LocalMooncake(port=port, segment_bytes=0) as mooncake:
        assert mooncake.address == f"127.0.0.1:{port}"
        assert is_served(mooncake.address) and is_served(mooncake.metrics_address)
        for address in (mooncake.address, mooncake.metrics_address):
            assert not is_served(address.replace("127.0.0.1", "127.0.0.2"))  # an address of loopback as well


def test_a_port_lost_between_choice_and_start_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from transfer.mooncake import local

    free_ports, choices = local._free_ports, []
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()

        def choose(count: int) -> list[int]:
            choices.append(free_ports(count) if choices else [thief.getsockname()[1]] * count)
            return choices[-1]

        monkeypatch.setattr(local, "_free_ports", choose)
        with LocalMooncake(**SMALL) as mooncake:
            assert mooncake.address == f"127.0.0.1:{choices[1][0]}"


def test_each_can_be_restarted() -> None:
    with LocalMooncake(**SMALL) as mooncake:
        address, master, store = mooncake.address, mooncake.master_pid, mooncake.store_pid
        assert store is not None and mooncake.ended() is None
        mooncake.restart_master()
        assert mooncake.address == address and is_served(address)
        assert mooncake.store_pid == store and alive(store)
        assert mooncake.master_pid != master and not alive(master)
        mooncake.restart_store()
        assert mooncake.store_pid != store and not alive(store)
        assert mooncake.ended() is None
        left = mooncake.master_pid, mooncake.store_pid
    mooncake.close()
    assert not any(alive(pid) for pid in left if pid)


def test_a_failed_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[program.Program] = []
    real = program.Program

    def note(name: str, flags: dict[str, str | int]) -> program.Program:
        started.append(real(name, flags))
        return started[-1]

    monkeypatch.setattr("transfer.mooncake.local.Program", note)
    with pytest.raises(Unavailable, match="mooncake_client was not ready after 2 s"):
        monkeypatch.setattr(LocalMooncake, "_segments", lambda self: set())
        LocalMooncake(**SMALL, ready_s=2)
    assert [one.name for one in started] == ["mooncake_master", "mooncake_client"]
    assert not any(alive(one.pid) for one in started)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "not installed; pip install 'mooncake-transfer-engine-non-cuda"),
        ("", "there is no .*mooncake_master.*; pip install "),
        (
            "echo 'error while loading shared libraries: libibverbs.so.1: cannot open' >&2; exit 127",
            r"exit code 127: .*libibverbs.so.1.*; apt-get install libibverbs1$",
        ),
        (
            "echo 'E0102 03:04:05.678901   7 master.cpp:1] no such thing' >&2; exit 3",
            r"exit code 3: no such thing$",
        ),
    ],
    ids=["no_package", "no_program", "no_library", "its_own_error"],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, message: str
) -> None:
    spec = ModuleSpec("mooncake", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    for user in (program, importlib.util):
        monkeypatch.setattr(user, "find_spec", lambda name: None if script is None else spec)
    if script:
        file = tmp_path / "mooncake_master"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(stat.S_IRUSR | stat.S_IWUSR)  # as some installers leave it
    with pytest.raises(Unavailable, match=message):
        LocalMooncake(segment_bytes=0)


@pytest.mark.parametrize("name", ["lease_ms", "client_ttl_s", "abandoned_put_s", "ready_s"])
def test_times_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"positive, got .*{name}=0"):
        LocalMooncake(**{name: 0})


def test_tests_have_a_network_of_their_own_where_they_may() -> None:
    allowed = subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode == 0
    assert not allowed or [name for _, name in socket.if_nameindex()] == ["lo"]
