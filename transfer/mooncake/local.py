"""A Mooncake of one machine: a master, and a process that holds the objects' memory."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from time import monotonic, sleep
from types import TracebackType
from typing import Self

from transfer.errors import Unavailable
from transfer.mooncake.program import Program

HOST = "127.0.0.1"
SMALLEST_SEGMENT = 16 << 20  # Mooncake's own
POLL_S = 0.02
ANSWER_S = 2.0
STARTS = 3  # a port that was free can be taken by the time the program wants it


class LocalMooncake:
    """A master and a store process: ready when the constructor returns, gone after `close`.

    They end with this process, however it ends, and with the thread that started them. The master listens on 127.0.0.1,
    the store process, as every client of Mooncake, on all interfaces.

    Args:
        port: the master's port; None for a free one.
        segment_bytes: the store process's memory, which bounds all objects together; 0 for no store process, where
            workers bring the memory themselves.
        lease_ms: how long an object that was read or asked about is safe from eviction.
        client_ttl_s: how long the master believes in a silent client, and in the objects that it holds.
        abandoned_put_s: how long a name stays blocked by a writer that died within its put.
        ready_s: how long to wait for each of the two to be ready.

    Raises:
        ValueError: a number out of its range, or a port that is taken.
        Unavailable: Mooncake is not installed, or one of the two did not start; says why.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        segment_bytes: int = 1 << 30,
        lease_ms: int = 10_000,
        client_ttl_s: int = 10,
        abandoned_put_s: int = 30,
        ready_s: float = 20.0,
    ) -> None:
        if segment_bytes and segment_bytes < SMALLEST_SEGMENT:
            need = f"0 or at least {SMALLEST_SEGMENT >> 20} MiB"
            raise ValueError(f"the store process needs {need}, got {segment_bytes} bytes")
        if min(lease_ms, client_ttl_s, abandoned_put_s, ready_s) <= 0:
            times = f"{lease_ms=}, {client_ttl_s=}, {abandoned_put_s=}, {ready_s=}"
            raise ValueError(f"times must be positive, got {times}")
        self.segment_bytes = segment_bytes
        self.lease_ms = lease_ms
        self._client_ttl_s = client_ttl_s
        self._abandoned_put_s = abandoned_put_s
        self._ready_s = ready_s
        self._programs: dict[str, Program] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            self._start_master_at(port)
            if segment_bytes:
                self.restart_store()
            undo.pop_all()

    @property
    def address(self) -> str:
        """The master's address, as clients want it."""
        return f"{HOST}:{self._port}"

    @property
    def metrics_address(self) -> str:
        """Where the master answers over HTTP: `/metrics`, `/health`, `/get_all_keys`, `/get_all_segments`."""
        return f"{HOST}:{self._metrics_port}"

    @property
    def master_pid(self) -> int:
        """The master's process id."""
        return self._programs["master"].pid

    @property
    def store_pid(self) -> int | None:
        """The store process's id; None where there is none."""
        return self._programs["store"].pid if "store" in self._programs else None

    def ended(self) -> str | None:
        """Which of the two has ended by itself, how, and its last errors; None while they run."""
        return next((said for said in map(Program.ended, self._programs.values()) if said), None)

    def restart_master(self) -> None:
        """Kills the master and starts it at the same address. All names are forgotten; the store process stays."""
        self._start_master()
        if self.store_pid:
            self._wait("store", lambda: bool(self._segments()))

    def restart_store(self) -> None:
        """Kills the store process, if there is one, and starts one with new, empty memory."""
        old = self._segments()
        (port,) = _free_ports(1)
        flags = {
            "master_server_address": self.address,
            "metadata_server": "P2PHANDSHAKE",
            "host": HOST,
            "port": port,
            "protocol": "tcp",
            "global_segment_size": self.segment_bytes,
        }
        self._start("store", "mooncake_client", flags, lambda: bool(self._segments() - old))

    def close(self) -> None:
        """Kills both. A second call does nothing."""
        while self._programs:
            self._programs.popitem()[1].kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_master_at(self, port: int | None) -> None:
        """Starts the master at `port`, or at a free one: with another if that is taken by the time it gets there."""
        if port is not None:
            _check_free(port)
        for left in reversed(range(STARTS)):
            free, self._metrics_port = _free_ports(2)
            self._port = free if port is None else port
            try:
                return self._start_master()
            except Unavailable:
                if not left or "master" not in self._programs:
                    raise

    def _start_master(self) -> None:
        flags = {
            "rpc_address": HOST,
            "rpc_port": self._port,
            "metrics_host": HOST,
            "metrics_port": self._metrics_port,
            "default_kv_lease_ttl": self.lease_ms,
            "client_ttl": self._client_ttl_s,
            "put_start_discard_timeout_sec": self._abandoned_put_s,
            "rpc_thread_num": 2,
            "enable_metric_reporting": "false",
        }
        self._start("master", "mooncake_master", flags, self._master_serves)

    def _start(self, name: str, program: str, flags: dict[str, str | int], ready: Callable[[], bool]) -> None:
        """Starts one of the two in the place of the one that runs."""
        if name in self._programs:
            self._programs.pop(name).kill()
        self._programs[name] = Program(program, flags)
        self._wait(name, ready)

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        """Waits until one of the two is ready."""
        program, end = self._programs[name], monotonic() + self._ready_s
        while True:
            if said := program.ended():
                raise Unavailable(said)
            with suppress(Unavailable):  # the master does not answer yet
                if ready():
                    return
            if monotonic() > end:
                raise Unavailable(f"{program.name} was not ready after {self._ready_s} s")
            sleep(POLL_S)

    def _master_serves(self) -> bool:
        self._ask("/health")
        with suppress(OSError):
            socket.create_connection((HOST, self._port), timeout=ANSWER_S).close()
            return self._programs["master"].ended() is None  # else it was another's port
        return False

    def _segments(self) -> set[str]:
        """Names of the memory that the master knows of, one a process that brings any."""
        return set(self._ask("/get_all_segments").split())

    def _ask(self, path: str) -> str:
        connection = http.client.HTTPConnection(HOST, self._metrics_port, timeout=ANSWER_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"the master at {self.address} does not answer: {error}") from error
        finally:
            connection.close()


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on, all different."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def _check_free(port: int) -> None:
    if not 0 < port < 1 << 16:
        raise ValueError(f"{port=} must be between 1 and 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ValueError(
                f"port {port} of {HOST} cannot be used ({error.strerror}): choose another"
            ) from None
