"""What holds a checkpoint in Mooncake dies, hangs or is full: misses, and a retry that succeeds once it is back.

Never wrong bytes, a call beyond its deadline, a crash, or the loss of what others hold. Each outage has real processes
of its own and must be waited out; many of them wait at the same time.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from time import sleep

import pytest

from transfer_actor import (
    MIB,
    SHORT_S,
    THERE,
    TIMEOUT_S,
    Died,
    local,
    read,
    until,
    worker,
    write,
    written_and_read,
)
from transfer_stage import raw_bytes

AT_ONCE = 6


@cache
def raw_digest(seed: int, nbytes: int) -> str:
    return hashlib.sha256(raw_bytes(seed, nbytes).tobytes()).hexdigest()


def the_owner_is_killed(moment: str) -> None:
    """A worker that lends memory dies around another's put. What the store process holds is not touched."""
    size = {"nbytes": 16 * MIB, "part_nbytes": MIB}
    with local() as mooncake, worker(mooncake) as writer, worker(mooncake) as reader:
        assert write(writer, "earlier", 1) == "stored"
        with worker(mooncake, segment_bytes=64 * MIB) as owner:
            if moment == "before":
                owner.kill()
            call = writer.begin("publish", name="x", seed=2, timeout=TIMEOUT_S, **size)
            if moment == "during":
                sleep(0.05)
                owner.kill()
            put = writer.finish(call, TIMEOUT_S)
            if moment == "after":
                assert put == "stored" and read(reader, "x", 2, nbytes=16 * MIB) == 2
                owner.kill()
        read(reader, "x", 2, nbytes=16 * MIB)
        assert until(lambda: read(reader, "earlier", 1) == 1, within=5)
        assert until(lambda: written_and_read(writer, reader, "x", 2, **size))
        assert read(reader, "earlier", 1) == 1


def a_writer_is_killed_that_lends_memory() -> None:
    """No store process: a worker dies within its own put, and takes what lay with it along, no more."""
    size = {"nbytes": 16 * MIB, "part_nbytes": MIB}
    with local(segment_mib=0) as mooncake, worker(mooncake, segment_bytes=64 * MIB) as other:
        assert write(other, "earlier", 1) == "stored"
        with worker(mooncake, segment_bytes=64 * MIB) as dying:
            call = dying.begin("publish", name="x", seed=2, timeout=TIMEOUT_S, die=(1, 0.01), **size)
            with suppress(Died):  # it may have been quick
                call.result(30)
            dying.wait_killed()
        assert read(other, "x", 2, nbytes=16 * MIB) is None
        assert read(other, "earlier", 1) == 1
        assert until(lambda: written_and_read(other, other, "x", 2, **size))
        assert read(other, "earlier", 1) == 1


def the_store_process_is_killed(moment: str) -> None:
    """Nobody holds memory any more: misses until there is another one."""
    size = {"nbytes": 16 * MIB, "part_nbytes": MIB}
    with local() as mooncake, worker(mooncake) as writer, worker(mooncake) as reader:
        assert mooncake.store_pid is not None
        if moment == "before":
            os.kill(mooncake.store_pid, signal.SIGKILL)
        call = writer.begin("publish", name="x", seed=2, timeout=TIMEOUT_S, **size)
        if moment == "during":
            sleep(0.03)
            os.kill(mooncake.store_pid, signal.SIGKILL)
        put = writer.finish(call, TIMEOUT_S)
        if moment == "after":
            assert put == "stored" and read(reader, "x", 2, nbytes=16 * MIB) == 2
            os.kill(mooncake.store_pid, signal.SIGKILL)
        assert moment == "after" or put not in THERE
        assert read(reader, "x", 2, nbytes=16 * MIB) is None
        mooncake.restart_store()
        assert until(lambda: written_and_read(writer, reader, "x", 2, **size))


def the_master_is_killed() -> None:
    """Nothing can be found until it is back, then nothing that was; a breaker keeps calls short in between."""
    size = {"nbytes": 16 * MIB, "part_nbytes": MIB}
    with local() as mooncake, worker(mooncake) as writer, worker(mooncake) as reader:
        assert write(writer, "earlier", 1, **size) == "stored"
        calls = [
            (writer, writer.begin("publish", name="x", seed=2, timeout=TIMEOUT_S, **size)),
            (reader, reader.begin("fetch", name="earlier", timeout=TIMEOUT_S)),
        ]
        os.kill(mooncake.master_pid, signal.SIGKILL)
        for actor, call in calls:
            actor.finish(call, TIMEOUT_S)
        for number in range(4):
            assert write(writer, f"y{number}", 3, timeout=SHORT_S) not in THERE
            assert read(reader, "earlier", 1, timeout=SHORT_S) is None
        assert reader.do("contains", keys=["earlier"], timeout=SHORT_S) == [False]
        assert reader.do("remove", keys=["earlier"], timeout=SHORT_S) == [False]
        assert writer.do("outcomes")["opened"] >= 1 and reader.do("outcomes")["opened"] >= 1
        mooncake.restart_master()
        assert until(lambda: written_and_read(writer, reader, "x", 2, **size))
        assert read(reader, "earlier", 1, nbytes=16 * MIB) is None


def one_is_stopped(which: str) -> None:
    """It answers nobody for a while, and nothing is lost."""
    with local(ttl_s=30) as mooncake, worker(mooncake) as writer, worker(mooncake) as reader:
        assert write(writer, "earlier", 1) == "stored"
        assert read(reader, "earlier", 1) == 1
        pid = mooncake.master_pid if which == "master" else mooncake.store_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            for number in range(3):
                assert write(writer, f"y{number}", 3, timeout=SHORT_S) not in THERE
                assert read(reader, "earlier", 1, timeout=SHORT_S) is None
        finally:
            os.kill(pid, signal.SIGCONT)
        assert until(lambda: read(reader, "earlier", 1) == 1)
        assert until(lambda: written_and_read(writer, reader, "x", 2))
        for number in range(3):
            assert read(reader, f"y{number}", 3) in (None, 3)


def the_store_is_full() -> None:
    """What is being read stays; once there is room again, writing goes on."""
    with (
        local(segment_mib=32, lease_ms=4000) as mooncake,
        worker(mooncake) as writer,
        worker(mooncake) as reader,
    ):
        small, large = (
            {"nbytes": 6 * MIB, "part_nbytes": 2 * MIB},
            {"nbytes": 48 * MIB, "part_nbytes": 4 * MIB},
        )
        assert write(writer, "earlier", 1, **small) == "stored"
        assert read(reader, "earlier", 1, nbytes=6 * MIB) == 1
        assert write(writer, "large", 2, timeout=SHORT_S, **large) not in THERE
        assert read(reader, "large", 2, nbytes=48 * MIB) is None
        assert read(reader, "earlier", 1, nbytes=6 * MIB) == 1
        assert until(lambda: written_and_read(writer, reader, "next", 3, **small))
        for name in ("earlier", "next"):
            assert writer.do("withdraw", name=name, timeout=6)
        most = {"nbytes": 20 * MIB, "part_nbytes": 4 * MIB}
        assert until(lambda: written_and_read(writer, reader, "most", 4, **most))


def a_lease_ends_during_a_read() -> None:
    """The store process hangs in the middle of it; before it goes on, the memory that is read is another object's."""
    with local(segment_mib=32, lease_ms=1, ttl_s=30) as mooncake, worker(mooncake) as writer:
        with worker(mooncake) as reader:
            size = 20 * MIB
            assert (
                writer.do("put", seeds={"0": 0, "small": 0}, nbytes=64, timeout=TIMEOUT_S) == ["stored"] * 2
            )
            assert until(
                lambda: reader.do("get", keys=["small"], timeout=TIMEOUT_S) != [None]
            )  # they know each other
            last = 0
            for seed in range(1, 6):
                assert mooncake.store_pid is not None
                os.kill(mooncake.store_pid, signal.SIGSTOP)
                get = reader.begin("get", keys=[str(last)], timeout=8)
                sleep(0.4)
                put = writer.begin("put", seeds={str(seed): seed}, nbytes=size, timeout=8)
                sleep(0.8)
                os.kill(mooncake.store_pid, signal.SIGCONT)
                old = {64: raw_digest(0, 64), size: raw_digest(last, size)}
                assert reader.finish(get, 8)[0] in (None, *old.values())
                if writer.finish(put, 8) == ["stored"]:
                    last = seed
            outcomes = reader.do("outcomes")
            assert outcomes.get("get absent", 0) + outcomes.get("get expired", 0) >= 1, outcomes


MOMENTS = ("before", "during", "after")
OUTAGES: dict[str, Callable[[], None]] = {
    **{
        f"owner_killed_{moment}_a_put": lambda moment=moment: the_owner_is_killed(moment)
        for moment in MOMENTS
    },
    **{
        f"store_killed_{moment}_a_put": lambda moment=moment: the_store_process_is_killed(moment)
        for moment in MOMENTS
    },
    "writer_and_owner_killed": a_writer_is_killed_that_lends_memory,
    "master_killed": the_master_is_killed,
    "master_stopped": lambda: one_is_stopped("master"),
    "store_stopped": lambda: one_is_stopped("store"),
    "store_full": the_store_is_full,
    "lease_ends": a_lease_ends_during_a_read,
}


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[None]]]:
    """The outages that were selected, all under way."""
    wanted = {item.name.partition("[")[2].rstrip("]") for item in request.session.items}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {outage: pool.submit(OUTAGES[outage]) for outage in OUTAGES if outage in wanted}


@pytest.mark.parametrize("outage", OUTAGES)
def test_outage(outage: str, running: dict[str, Future[None]]) -> None:
    running[outage].result(120)
