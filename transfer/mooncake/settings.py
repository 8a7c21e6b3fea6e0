"""How to reach a Mooncake Store, and how long to bear with it."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """Of one store.

    Attributes:
        master: where `mooncake_master` answers, `host:port` (its flags `--rpc_address` and `--rpc_port`).
        hostname: name or address under which other processes of the store reach this one.
        protocol: `tcp`, or `rdma`.
        devices: RDMA devices by name; none lets Mooncake choose.
        segment_bytes: memory that this process lends to the store; 0 makes it a pure client, for which other
            processes must hold the objects.
        recycled_bytes: most memory that stays registered for reuse, in staging and in values that were let go.
        threads: library calls at a time. One that hangs takes a thread until it ends.
        tries: most tries of an object that found no room, or whose transfer failed.
        failures: calls in a row that fail or are late until the breaker opens.
        pause_s: seconds until an open breaker lets one call try.
        close_s: most seconds that `close` waits for calls that still run.
    """

    master: str = "127.0.0.1:50051"
    hostname: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: tuple[str, ...] = ()
    segment_bytes: int = 0
    recycled_bytes: int = 1024 * MIB
    threads: int = 4
    tries: int = 8
    failures: int = 3
    pause_s: float = 5.0
    close_s: float = 5.0

    def __post_init__(self) -> None:
        host, colon, port = self.master.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"master={self.master!r} must be host:port, as 127.0.0.1:50051")
        if self.protocol not in ("tcp", "rdma"):
            raise ValueError(f"protocol={self.protocol!r} must be 'tcp' or 'rdma'")
        if self.devices and self.protocol != "rdma":
            raise ValueError(f"devices={self.devices} are RDMA devices, and protocol is {self.protocol!r}")
        if min(self.segment_bytes, self.recycled_bytes) < 0:
            raise ValueError(f"bytes are not negative, got {self.segment_bytes=} {self.recycled_bytes=}")
        if min(self.threads, self.tries, self.failures) < 1:
            raise ValueError(f"at least one of each, got {self.threads=} {self.tries=} {self.failures=}")
        if min(self.pause_s, self.close_s) <= 0:
            raise ValueError(f"seconds are positive, got {self.pause_s=} {self.close_s=}")

    @property
    def address(self) -> tuple[str, int]:
        """The master's host and port."""
        host, _, port = self.master.rpartition(":")
        return host.strip("[]"), int(port)
