"""`python -m transfer up`: a Mooncake of one machine, for as long as the command runs."""

from __future__ import annotations

import json
import os
import signal
from threading import Event
from typing import Annotated

import typer

from transfer.errors import Unavailable
from transfer.mooncake.local import LocalMooncake

WATCH_S = 0.2


def up(
    port: Annotated[int | None, typer.Option(help="The master's port; any free one by default.")] = None,
    segment_mb: Annotated[int, typer.Option(help="MiB of the store process; 0 for none.")] = 1024,
    lease_ms: Annotated[int, typer.Option(help="How long what was read is safe from eviction.")] = 10_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Starts a local Mooncake, a master and a store process, prints its address and waits.

    Ctrl-C, SIGTERM or the end of the process that started this one stop both. If one of the two ends by itself, the
    other is stopped and the exit code is 1.
    """
    parent = os.getppid()
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    with LocalMooncake(port=port, segment_bytes=segment_mb << 20, lease_ms=lease_ms) as mooncake:
        print(json.dumps(_facts(mooncake)) if as_json else _text(mooncake), flush=True)
        while not stop.wait(WATCH_S):
            if said := mooncake.ended():
                raise Unavailable(said)
            if os.getppid() != parent:
                return


def _facts(mooncake: LocalMooncake) -> dict[str, str | int | None]:
    return {
        "address": mooncake.address,
        "metrics": f"http://{mooncake.metrics_address}/metrics",
        "master_pid": mooncake.master_pid,
        "store_pid": mooncake.store_pid,
        "segment_mb": mooncake.segment_bytes >> 20,
        "lease_ms": mooncake.lease_ms,
    }


def _text(mooncake: LocalMooncake) -> str:
    facts = _facts(mooncake)
    store = f"process {facts['store_pid']}, {facts['segment_mb']} MiB" if mooncake.store_pid else "none"
    return f"""\
address   {facts["address"]}
metrics   {facts["metrics"]}
master    process {facts["master_pid"]}
store     {store}
Ctrl-C stops both."""
