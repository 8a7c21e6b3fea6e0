"""Pages pushed to another process, beside one bare write of the same bytes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from time import sleep
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.bare import LOOPBACK
from benchmarks.timing import Contender, race
from transfer.mooncake.library import load_engine
from transfer.pages import Change, Descriptor, MooncakeWire, Outcome, PageLink, Pool

PAGE_NBYTES, NUM_PAGES = 64 << 10, 1024  # 64 MiB
RUNS = (1, 16, 1024)
BARE = "bare write"
NOTES = {
    "pages": "64 MiB in pages of 64 KiB that lie in so many runs, until the receiver knows that all is there"
}


def scattered(runs: int) -> list[int]:
    """`NUM_PAGES` of twice as many pages, in so many runs of neighbours."""
    each = NUM_PAGES // runs
    return [2 * each * run + at for run in range(runs) for at in range(each)]


def measure(quick: bool, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """One record a number of runs, and one of Mooncake's `transfer_sync_write` of one piece."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    receiver = spawn.Process(target=_receive, args=(theirs,), daemon=True)
    receiver.start()
    pool = Pool({"plane": np.ones(2 * NUM_PAGES * PAGE_NBYTES, np.uint8)}, PAGE_NBYTES)
    link = PageLink(pool, "sender", 1, MooncakeWire())
    engine = load_engine(LOOPBACK, "tcp").TransferEngine()
    source, nbytes = np.ones(NUM_PAGES * PAGE_NBYTES, np.uint8), NUM_PAGES * PAGE_NBYTES
    started = engine.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", "")
    if started or engine.register_memory(source.ctypes.data, nbytes):
        raise RuntimeError("Mooncake's engine did not start")
    descriptor = Descriptor.from_json(ours.recv())

    def bare(_: object) -> None:
        target = descriptor.planes[0].address
        if engine.transfer_sync_write(descriptor.address, source.ctypes.data, target, nbytes):
            raise RuntimeError("the bare write failed")

    def open_pages(pages: list[int]) -> tuple[int, list[int]]:
        ours.send(pages)
        return ours.recv(), pages

    def push(opened: Any) -> None:
        attempt, pages = opened
        outcome = link.push(descriptor, attempt, pages, pages, 60.0)
        if outcome is not Outcome.DONE or ours.recv() is not True:
            raise RuntimeError(f"a push ended with {outcome}")

    contenders = [Contender(name=BARE, call=bare)]
    for runs in RUNS:
        pages = scattered(runs)
        prepare = lambda pages=pages: open_pages(pages)  # noqa: E731
        contenders.append(Contender(name=f"push, {runs} runs", call=push, prepare=prepare))
    timings = race(
        contenders, rounds=2 if quick else 15, budget_s=20.0, on_call=lambda name: log(f"pages: {name}")
    )
    ours.send(None)
    receiver.join(10)
    link.close()
    base = timings[BARE].median_ms
    return [
        {"way": name, "nbytes": NUM_PAGES * PAGE_NBYTES, "ratio_to_bare": base / timing.median_ms}
        | timing.figures("push")
        for name, timing in timings.items()
    ]


def _receive(pipe: Connection) -> None:
    """The other process: opens the pages it is told, and says when they are whole."""
    pool = Pool({"plane": np.zeros(2 * NUM_PAGES * PAGE_NBYTES, np.uint8)}, PAGE_NBYTES)
    link = PageLink(pool, "receiver", 1, MooncakeWire())
    pipe.send(link.descriptor.to_json())
    while (pages := pipe.recv()) is not None:
        pipe.send(link.open(pages))
        while not any(arrival.change is Change.WHOLE for arrival in link.poll()):
            sleep(1e-4)
        pipe.send(True)
    link.close()


def show(console: Any, records: list[dict[str, Any]]) -> None:
    """One row a way."""
    rows = [
        (record["way"], report.pair(record, "push"), f"{record['ratio_to_bare']:.2f}") for record in records
    ]
    columns = ("", "ms, least / median", "of bare")
    console.print(report.table("64 MiB of pages to another process", columns, rows))
