"""Pages pushed between links: one contract for the network in memory and for Mooncake, then each one's own faults."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import pytest

from page_site import Child, Site, random_pool
from transfer import Closed, Unavailable
from transfer.pages import (
    Descriptor,
    Fault,
    LoopbackWire,
    MooncakeWire,
    Network,
    Outcome,
    PageLink,
    Pool,
    random_faults,
)
from transfer.pages.runs import Run, coalesce

PAGES, PAGE_NBYTES, PLANES = 64, 4096, ["layer0", "layer1"]
SETTLE_S = 0.5
TIMEOUT_S = 20.0
ENVIRONMENT = os.environ | {"PYTHONPATH": "."}


class Loopback:
    """Sites of this process, in virtual time."""

    def __init__(self) -> None:
        self.network = Network()
        self._ports, self._epochs = iter(range(1, 99)), iter(range(1, 99))

    def site(self, name: str, address: str | None = None, **options: Any) -> Any:
        options = {"seed": 1, "num_pages": PAGES, "page_nbytes": PAGE_NBYTES, "planes": PLANES} | options
        wire = LoopbackWire(self.network, address or f"127.0.0.1:{next(self._ports)}")
        pool = random_pool(**options)
        return Site(PageLink(pool, name, next(self._epochs), wire, SETTLE_S), pool)

    def restart(self, old: Any, name: str) -> Any:
        """In its place, with the same address."""
        address = old.link.descriptor.address
        self.kill(old)
        return self.site(name, address)

    def kill(self, site: Any) -> None:
        self.network.kill(site.link.descriptor.address)

    def sleep(self, seconds: float) -> None:
        self.network.advance(seconds)

    def close(self) -> None:
        pass


class Mooncake:
    """Sites of their own processes, all in one network of their own where the machine allows that."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def site(self, name: str, environment: dict[str, str] | None = None, **options: Any) -> Any:
        options = {"seed": 1, "num_pages": PAGES, "page_nbytes": PAGE_NBYTES, "planes": PLANES} | options
        child = Child(ENVIRONMENT | (environment or {}), peer=name, settle=SETTLE_S, **options)
        self._children.append(child)
        return child

    def restart(self, old: Any, name: str) -> Any:
        """In its place, with another port."""
        self.kill(old)
        return self.site(name)

    def kill(self, site: Any) -> None:
        self._children.remove(site)
        site.kill()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        for child in self._children:
            child.kill()


@pytest.fixture(params=[Loopback, Mooncake], ids=["loopback", "mooncake"], scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A place for sites."""
    made = request.param()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pair(world: Any) -> tuple[Any, Any]:
    """A sender and a receiver that outlive the test."""
    return world.site("prefill", seed=1), world.site("decode", seed=2)


def changes(world: Any, site: Any, last: str, seconds: float = 10.0) -> list[list[Any]]:
    """All changes until one that is `last`."""
    found: list[list[Any]] = []
    for _ in range(int(seconds / 0.02)):
        found += site.poll()
        if found and found[-1][2] == last:
            return found
        world.sleep(0.02)
    raise AssertionError(f"no {last} within {seconds} s, only {found}")


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_as_few_as_can_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    local = rng.permutation(12)[: rng.integers(1, 13)].tolist()
    remote = rng.permutation(12)[: len(local)].tolist()
    if seed % 2:
        remote = [(page + 5 * (page > 6)) for page in local]
    moves = dict(zip(local, remote))
    runs = coalesce(local, remote)
    moved = [(run.local + i, run.remote + i) for run in runs for i in range(run.count)]
    assert sorted(moved) == sorted(moves.items())
    starts = [page for page in sorted(moves) if moves.get(page - 1) != moves[page] - 1]
    assert sorted(run.local for run in runs) == starts


def test_runs_of_a_page_that_goes_to_two_places() -> None:
    assert sorted(coalesce([4, 4, 5], [8, 2, 3])) == [Run(4, 2, 2), Run(4, 8, 1)]
    assert coalesce([], []) == []


def descriptor(**fields: Any) -> dict[str, Any]:
    """A good one, with other fields."""
    text = Loopback().site("decode").descriptor()
    return json.loads(text) | fields


def test_a_descriptor_is_the_same_on_the_other_side() -> None:
    link = Loopback().site("decode").link
    assert Descriptor.from_json(link.descriptor.to_json()) == link.descriptor


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 2}, "version=2, this side knows 1"),
        ({"peer": ""}, "a peer and a host:port"),
        ({"address": "nowhere"}, "a peer and a host:port"),
        ({"address": "127.0.0.1:70000"}, "a peer and a host:port"),
        ({"epoch": -1}, "whole and in 1 .. 2..64 - 1, not {'epoch': -1}"),
        ({"control": "x"}, "not {'control': 'x'}"),
        ({"page_nbytes": 0}, "not {'page_nbytes': 0}"),
        ({"num_pages": 1.0}, "not {'num_pages': 1.0}"),
        ({"num_pages": True}, "not {'num_pages': True}"),
        ({"planes": []}, "planes of distinct names"),
        ({"planes": [["a", 1], ["a", 9]]}, "planes of distinct names"),
        ({"planes": [["a", 2**64 - 1]]}, "beyond the end of memory"),
        ({"planes": [["a"]]}, "not a descriptor of pages"),
        ({"planes": 7}, "not a descriptor of pages"),
        ({"planes": [["epoch", -3]]}, "not {\"plane 'epoch'\": -3}"),
        ({"extra": 1}, "missing or unknown: ..extra"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_broken_descriptor_is_said_to_be_one(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Descriptor.from_json(json.dumps(descriptor(**fields)))


@pytest.mark.parametrize("text", ["", "7", "[]", "{}", '{"version": 1}', "\ud800"], ids=range(6))
def test_other_text_is_no_descriptor(text: str) -> None:
    with pytest.raises(ValueError, match="not a descriptor of pages"):
        Descriptor.from_json(text)


MEMORY = np.zeros(64, np.uint8)


@pytest.mark.parametrize(
    ("planes", "page_nbytes", "message"),
    [
        ({}, 8, "at least one plane and byte"),
        ({"a": MEMORY}, 0, "at least one plane and byte"),
        ({"a": MEMORY.view(np.float32)}, 8, r"'a' is float32\[16\]"),
        ({"a": MEMORY.reshape(8, 8)}, 8, r"'a' is uint8\[8, 8\]"),
        ({"a": MEMORY[::2]}, 8, "give a contiguous"),
        ({"a": np.frombuffer(bytes(64), np.uint8)}, 8, "'a' is read-only"),
        ({"a": MEMORY}, 48, "whole number of pages of 48 bytes"),
        ({"a": MEMORY[:0]}, 8, "whole number of pages of 8 bytes"),
        ({"a": MEMORY[:32], "b": np.zeros(24, np.uint8)}, 8, "'a': 32, 'b': 24"),
        ({"a": MEMORY[:32], "b": MEMORY[16:48]}, 8, "planes 'a' and 'b' overlap"),
    ],
    ids=["none", "no bytes", "float", "2-d", "strided", "read-only", "part", "empty", "sizes", "overlap"],
)
def test_a_pool_of_other_memory_is_refused(planes: dict[str, Any], page_nbytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pool(planes, page_nbytes)


@pytest.mark.parametrize(
    ("peer", "epoch", "settle", "message"),
    [
        ("decode", 0, 1.0, "epoch=0 is in 1"),
        ("decode", 2**64, 1.0, "is in 1 .. 2..64 - 1"),
        ("decode", 1, -1.0, "settle=-1.0 is not negative"),
        ("", 1, 1.0, "a peer and a host:port, not ''"),
    ],
    ids=["no epoch", "large epoch", "rest", "name"],
)
def test_a_link_that_no_peer_could_use_is_refused(peer: str, epoch: int, settle: float, message: str) -> None:
    pool = Pool({"a": MEMORY}, 8)
    with pytest.raises(ValueError, match=message):
        PageLink(pool, peer, epoch, LoopbackWire(Network(), "127.0.0.1:1"), settle)


def test_a_page_beyond_the_pool_is_none_of_its() -> None:
    pool = Pool({"a": MEMORY[:32], "b": MEMORY[32:]}, 8)
    assert pool.num_pages == 4
    for page in (-1, 4):
        with pytest.raises(ValueError, match=f"page={page} is not in 0 .. 3"):
            pool.page("a", page)


def test_without_the_library_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(Unavailable, match=r"pip install 'mooncake-transfer-engine-non-cuda>=0.3.13.post1'"):
        MooncakeWire()


SCATTERED = {
    "one": ([5], [9]),
    "run": (list(range(8, 40)), list(range(20, 52))),
    "scattered": ([3, 50, 4, 5, 0, 63], [62, 0, 10, 11, 33, 1]),
    "backwards": (list(range(10, 20)), list(range(29, 19, -1))),
    "all": (list(range(PAGES)), list(range(PAGES))),
}


@pytest.mark.parametrize(("local", "remote"), SCATTERED.values(), ids=list(SCATTERED))
def test_pages_arrive_whole_and_no_others_change(pair: Any, local: list[int], remote: list[int]) -> None:
    sender, receiver = pair
    before = receiver.pages(list(range(PAGES)))
    attempt = receiver.open(remote)
    assert receiver.held() == sorted(remote)
    assert sender.push(receiver.descriptor(), attempt, local, remote, TIMEOUT_S) == "done"
    # the notice was delivered before the push was done
    assert receiver.poll() == [[attempt, remote, "whole"]]
    assert receiver.pages(remote) == sender.pages(local)
    others = sorted(set(range(PAGES)) - set(remote))
    assert receiver.pages(others) == [before[page] for page in others]
    assert receiver.held() == sender.lent() == sender.running() == receiver.poll() == []


def change(descriptor: str, **fields: Any) -> str:
    """A descriptor with other fields."""
    return json.dumps(json.loads(descriptor) | fields)


REFUSED: dict[str, tuple[str, Callable[[str], str], list[int]]] = {
    "beyond the end": ("bounds", lambda text: text, [1, PAGES]),
    "negative": ("bounds", lambda text: text, [-1, 1]),
    "twice": ("bounds", lambda text: text, [1, 1]),
    "page size": ("layout", lambda text: change(text, page_nbytes=PAGE_NBYTES // 2), [1, 2]),
    "planes": ("layout", lambda text: change(text, planes=json.loads(text)["planes"][:1]), [1, 2]),
    "another start": ("stale", lambda text: change(text, peer="other", epoch=7), [1, 2]),
    "nobody": ("unreachable", lambda text: change(text, peer="nobody", address="127.0.0.1:9"), [1, 2]),
}


@pytest.mark.parametrize(("outcome", "wrong", "remote"), REFUSED.values(), ids=list(REFUSED))
def test_what_does_not_fit_is_refused_and_writes_nothing(
    pair: Any, outcome: str, wrong: Callable[[str], str], remote: list[int]
) -> None:
    sender, receiver = pair
    before = receiver.pages(list(range(PAGES)))
    attempt = receiver.open([1, 2])
    assert sender.push(wrong(receiver.descriptor()), attempt, [3, 4], remote, TIMEOUT_S) == outcome
    assert receiver.pages(list(range(PAGES))) == before
    assert sender.lent() == sender.running() == receiver.poll() == []
    assert receiver.held() == [1, 2]  # nobody told the receiver, so its caller does


@pytest.fixture(autouse=True)
def nothing_held(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that share a pair leave it with no page held."""
    yield
    if "pair" in request.fixturenames:
        world, receiver = request.getfixturevalue("world"), request.getfixturevalue("pair")[1]
        for attempt in range(1, 100):
            receiver.gone(attempt)
        for _ in range(100):
            receiver.poll()
            if not receiver.held():
                return
            world.sleep(SETTLE_S / 8)
        raise AssertionError("pages stayed held")


@pytest.mark.parametrize(
    ("local", "remote", "timeout", "message"),
    [
        ([PAGES], [1], 1.0, r"local pages \[64\] are not in 0 .. 63"),
        ([-1], [1], 1.0, r"local pages \[-1\] are not in 0 .. 63"),
        ([1], [1, 2], 1.0, "1 local and 2 remote pages"),
        ([], [], 1.0, "0 local and 0 remote pages"),
        ([1], [1], 0.0, "timeout=0.0 is not positive"),
        ([1], [1], float("nan"), "timeout=nan is not positive"),
        ([1], [1], float("inf"), "timeout=inf is not positive and finite"),
    ],
    ids=["beyond", "negative", "lengths", "none", "no time", "nan", "inf"],
)
def test_wrong_use_raises(local: list[int], remote: list[int], timeout: float, message: str) -> None:
    world = Loopback()
    sender, receiver = world.site("prefill"), world.site("decode")
    with pytest.raises(ValueError, match=message):
        sender.push(receiver.descriptor(), receiver.open([1, 2]), local, remote, timeout)


def test_an_abandoned_attempt_is_never_whole(pair: Any) -> None:
    sender, receiver = pair
    attempt = receiver.open([1])
    receiver.abandon(attempt)
    assert receiver.poll() == []
    assert receiver.held() == [1]
    assert sender.push(receiver.descriptor(), attempt, [1], [1], TIMEOUT_S) == "done"
    assert receiver.poll() == [[attempt, [1], "free"]]


def test_an_attempt_is_pushed_once() -> None:
    _, sender, receiver = two()
    attempt = receiver.open([1])
    assert sender.push(receiver.descriptor(), attempt, [1], [1], 1.0) == "done"
    assert sender.push(receiver.descriptor(), attempt, [2], [1], 1.0) == "repeated"
    assert receiver.page(1) == sender.page(1)


def test_only_what_was_refused_left_the_peer_untouched() -> None:
    untouched = [outcome.value for outcome in Outcome if outcome.untouched]
    assert untouched == ["bounds", "layout", "stale", "busy", "unreachable"]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([], "one at least"),
        ([PAGES], "not .64"),
        ([-1], "not .-1"),
        ([4, 4], "distinct"),
        ([1, 2], r"pages \[2\] may"),
    ],
    ids=["none", "beyond", "negative", "twice", "held"],
)
def test_only_free_pages_of_the_pool_are_opened(pages: list[int], message: str) -> None:
    receiver = Loopback().site("decode")
    receiver.open([2, 3])
    with pytest.raises(ValueError, match=message):
        receiver.open(pages)
    assert receiver.held() == [2, 3]


def test_a_restarted_peer_refuses_its_old_descriptor(world: Any) -> None:
    sender, receiver = world.site("prefill"), world.site("decode")
    old = receiver.descriptor()
    assert sender.push(old, receiver.open([1]), [1], [1], TIMEOUT_S) == "done"
    receiver = world.restart(receiver, "decode")
    before = receiver.pages(list(range(PAGES)))
    # the place is empty, or has another one's memory: the sender cannot know of the restart yet
    assert sender.push(old, 2, [1], [1], TIMEOUT_S) in ("unreachable", "stale")
    assert receiver.pages(list(range(PAGES))) == before
    new = receiver.descriptor()
    assert sender.push(new, receiver.open([1, 2]), [3, 4], [1, 2], TIMEOUT_S) == "done"
    assert sender.push(old, 3, [1], [1], TIMEOUT_S) == "stale"
    assert receiver.pages([1, 2]) == sender.pages([3, 4])


def test_after_close_nothing_is_done_and_nothing_written(world: Any) -> None:
    sender, receiver = world.site("prefill"), world.site("decode")
    descriptor, attempt = receiver.descriptor(), receiver.open([1])
    receiver.close()
    receiver.close()
    receiver.fill([1], 7)
    assert sender.push(descriptor, attempt, [1], [1], TIMEOUT_S) in ("stale", "unreachable")
    assert receiver.page(1) == "07" * (PAGE_NBYTES * len(PLANES))
    sender.close()
    for call, arguments in [
        ("push", (descriptor, 2, [1], [1], 1.0)),
        ("open", ([1],)),
        ("poll", ()),
        ("gone", (1,)),
    ]:
        with pytest.raises((Closed, RuntimeError), match="the link of prefill was closed"):
            getattr(sender, call)(*arguments)


# slow enough to be met half way: every page is a run
MANY = {"num_pages": 4096, "planes": ["latent"]}
ALL, BACKWARDS = list(range(4096)), list(range(4095, -1, -1))


def half_way(sender: Any, receiver: Any, timeout: float) -> int:
    """Begins to push everything; returns the attempt when some has arrived and most has not."""
    sender.fill(ALL, 9)
    receiver.fill(ALL, 0)
    attempt = receiver.open(ALL)
    sender.begin(receiver.descriptor(), attempt, ALL, BACKWARDS, timeout)
    for _ in range(10_000):
        if receiver.filled(9) > 100:
            break
    assert receiver.filled(0) > 1000
    return attempt


@pytest.fixture(scope="module")
def processes() -> Iterator[Mooncake]:
    """Real processes that end with the module."""
    world = Mooncake()
    yield world
    world.close()


@pytest.fixture(scope="module")
def sender(processes: Mooncake) -> Any:
    """One that outlives its receivers."""
    return processes.site("prefill", **MANY)


def test_a_killed_receiver_is_a_failure(processes: Mooncake, sender: Any) -> None:
    receiver = processes.site("decode", **MANY)
    half_way(sender, receiver, TIMEOUT_S)
    start = time.monotonic()
    processes.kill(receiver)
    assert sender.end() == "failed"
    assert time.monotonic() - start < 5
    assert sender.lent() == sender.running() == []
    assert sender.pages([0, 4095]) == ["09" * PAGE_NBYTES] * 2  # and the sender lives


def test_many_threads_push_at_once(processes: Mooncake, sender: Any) -> None:
    receiver = processes.site("decode", seed=2, **MANY)
    pages = list(range(0, 240, 10))
    attempts = [receiver.open([page]) for page in pages]
    assert sender.push_each(receiver.descriptor(), attempts, pages) == ["done"] * len(pages)
    assert sorted(receiver.poll()) == [[attempt, [page], "whole"] for attempt, page in zip(attempts, pages)]
    assert receiver.pages(pages) == sender.pages(pages)


def test_a_receiver_that_closes_half_way_is_written_to_no_more(processes: Mooncake, sender: Any) -> None:
    receiver = processes.site("decode", **MANY)
    half_way(sender, receiver, TIMEOUT_S)
    receiver.close()
    receiver.fill(ALL, 5)
    assert sender.end() == "failed"
    time.sleep(0.3)
    assert receiver.values() == [5]


def test_a_killed_sender_leaves_pages_held_until_its_end_is_known(processes: Mooncake) -> None:
    sender, receiver = processes.site("prefill", **MANY), processes.site("decode", **MANY)
    attempt = half_way(sender, receiver, TIMEOUT_S)
    processes.kill(sender)
    receiver.abandon(attempt)
    time.sleep(2 * SETTLE_S)
    assert receiver.poll() == []
    assert receiver.held() == ALL
    receiver.gone(attempt)
    assert receiver.poll() == []  # it rests first
    assert changes(processes, receiver, "free") == [[attempt, ALL, "free"]]
    assert receiver.held() == []


def test_a_stopped_receiver_is_late_and_its_pages_wait_for_the_library(
    processes: Mooncake, sender: Any
) -> None:
    receiver = processes.site("decode", **MANY)
    receiver_descriptor = receiver.descriptor()
    attempt = half_way(sender, receiver, 0.7)
    os.kill(receiver.process.pid, signal.SIGSTOP)
    start = time.monotonic()
    assert sender.end() == "late"
    assert time.monotonic() - start < 2
    assert sender.lent() == ALL  # what is under way is read from here
    assert len(sender.running()) == 1
    outcomes = [sender.push(receiver_descriptor, 1000 + i, [0], [0], 0.01) for i in range(32)]
    assert outcomes == ["late"] * 31 + ["busy"]
    os.kill(receiver.process.pid, signal.SIGCONT)
    assert changes(processes, receiver, "free") == [[attempt, ALL, "failed"], [attempt, ALL, "free"]]
    assert receiver.filled(9) < len(ALL)  # nothing was begun after the deadline
    receiver.fill(ALL, 5)
    time.sleep(0.3)
    assert receiver.values() == [5]  # nothing came after "free"
    assert sender.lent() == sender.running() == receiver.held() == []
    assert sender.push(receiver.descriptor(), receiver.open([0]), [1], [0], TIMEOUT_S) == "done"


def test_bytes_that_the_network_had_come_before_the_pages_are_free(processes: Mooncake) -> None:
    """The library gives up on a stopped peer before that goes on; what was sent is written all the same."""
    waits = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "1", "MC_TCP_STATUS_TIMEOUT_SEC": "1"}
    sender = processes.site("prefill", waits, **MANY)
    receiver = processes.site("decode", **MANY)
    half_way(sender, receiver, TIMEOUT_S)
    os.kill(receiver.process.pid, signal.SIGSTOP)
    assert sender.end() == "failed"
    assert sender.lent() == []
    os.kill(receiver.process.pid, signal.SIGCONT)
    assert [kind for _, _, kind in changes(processes, receiver, "failed")] == ["failed"]  # they rest first
    assert [kind for _, _, kind in changes(processes, receiver, "free")] == ["free"]
    receiver.fill(ALL, 5)
    time.sleep(0.3)
    assert receiver.values() == [5]


def two(*faults: Fault) -> tuple[Loopback, Any, Any]:
    """A sender and a receiver in memory, and what happens to the pushes."""
    world = Loopback()
    world.network = Network(faults)
    return world, world.site("prefill", seed=1), world.site("decode", seed=2)


def test_a_late_write_reaches_only_held_pages() -> None:
    world, sender, receiver = two(Fault(slow=3.0))
    before, attempt = receiver.pages([8, 9]), receiver.open([8, 9])
    assert sender.push(receiver.descriptor(), attempt, [1, 2], [8, 9], 1.0) == "late"
    assert sender.lent() == [1, 2]
    receiver.abandon(attempt)
    part = receiver.pages([8, 9])
    world.sleep(1.5)
    assert receiver.poll() == []
    assert receiver.held() == [8, 9]
    assert len({tuple(before), tuple(part), tuple(receiver.pages([8, 9]))}) == 3
    world.sleep(1.0)
    # all is there, but its sender had given up
    assert receiver.poll() == [[attempt, [8, 9], "free"]]
    assert sender.lent() == receiver.held() == []


def test_a_late_push_that_has_not_begun_writes_nothing() -> None:
    world, sender, receiver = two(Fault(wait=3.0))
    before, attempt = receiver.pages([8]), receiver.open([8])
    assert sender.push(receiver.descriptor(), attempt, [1], [8], 1.0) == "late"
    assert sender.running() == [["decode", receiver.link.descriptor.epoch, attempt]]
    world.sleep(3.0)
    assert receiver.poll() == [[attempt, [8], "failed"], [attempt, [8], "free"]]
    assert receiver.pages([8]) == before


def test_pages_of_a_broken_push_rest_while_the_receiver_is_awake() -> None:
    world, sender, receiver = two(Fault(cut=0.5, tail=0.9 * SETTLE_S))
    attempt = receiver.open([8, 9])
    assert sender.push(receiver.descriptor(), attempt, [1, 2], [8, 9], 1.0) == "failed"
    assert sender.lent() == []
    sent = sender.pages([1, 2])
    sender.fill([1, 2], 0)  # what is under way was copied
    world.sleep(0.0)
    assert receiver.poll() == [[attempt, [8, 9], "failed"]]
    with pytest.raises(ValueError, match=r"pages \[9\] may still be written to"):
        receiver.open([9])
    polls = 0
    while not (news := receiver.poll()):
        polls += 1
        world.sleep(10 * SETTLE_S)  # this process sleeps: of each pause a quarter counts
    assert (news, polls) == ([[attempt, [8, 9], "free"]], 4)
    assert receiver.pages([8, 9]) == sent  # the tail came in while they rested


def test_a_notice_that_comes_again_changes_nothing() -> None:
    world, sender, receiver = two(Fault(repeat=3))
    first = receiver.open([8])
    assert sender.push(receiver.descriptor(), first, [1], [8], 1.0) == "done"
    assert receiver.poll() == [[first, [8], "whole"]]
    second = receiver.open([8])
    world.sleep(5.0)
    assert receiver.poll() == []
    assert (second, receiver.held()) == (first + 1, [8])


def test_a_lost_notice_is_found_by_asking_the_sender() -> None:
    world, sender, receiver = two(Fault(lose=True))
    attempt = receiver.open([8])
    assert sender.push(receiver.descriptor(), attempt, [1], [8], 1.0) == "done"
    assert receiver.poll() == []
    receiver.abandon(attempt)
    assert sender.running() == []
    receiver.gone(attempt)
    assert changes(world, receiver, "free") == [[attempt, [8], "free"]]


def test_pages_whose_sender_is_gone_rest_before_they_are_free() -> None:
    world, sender, receiver = two(Fault(cut=0.5, tail=0.9 * SETTLE_S, lose=True))
    attempt = receiver.open([8])
    assert sender.push(receiver.descriptor(), attempt, [1], [8], 1.0) == "failed"
    receiver.gone(attempt)
    assert receiver.poll() == [[attempt, [8], "failed"]]
    assert changes(world, receiver, "free") == [[attempt, [8], "free"]]
    assert receiver.page(8) == sender.page(1)  # the tail had come by then


def test_a_receiver_that_ends_half_way_is_a_failure() -> None:
    world, sender, receiver = two(Fault(slow=2.0, kill=True))
    assert sender.push(receiver.descriptor(), receiver.open([8, 9]), [1, 2], [8, 9], 5.0) == "failed"
    assert sender.running() == []
    assert world.network.now == 2.0


def test_a_successor_is_not_written_to() -> None:
    world, sender, receiver = two(Fault(slow=2.0))
    descriptor, attempt = receiver.descriptor(), receiver.open([8, 9])
    assert sender.push(descriptor, attempt, [1, 2], [8, 9], 0.9) == "late"
    world.kill(receiver)
    # its address and its memory are those of the one that ended
    wire = LoopbackWire(world.network, receiver.link.descriptor.address)
    receiver = Site(
        PageLink(receiver.pool, "decode", receiver.link.descriptor.epoch + 1, wire), receiver.pool
    )
    before = receiver.pages(ALL[:PAGES])
    assert receiver.open([8, 9]) == attempt  # numbers begin again, epochs do not
    assert sender.running() != []
    world.sleep(5.0)
    assert sender.push(descriptor, 2, [1], [8], 5.0) == "unreachable"
    assert receiver.poll() == sender.running() == []
    assert receiver.pages(ALL[:PAGES]) == before


def test_a_late_push_is_never_whole() -> None:
    world, sender, receiver = two(Fault(slow=3.0))
    attempt = receiver.open([8, 9])
    assert sender.push(receiver.descriptor(), attempt, [1, 2], [8, 9], 1.0) == "late"
    world.sleep(3.0)
    assert receiver.poll() == [[attempt, [8, 9], "failed"], [attempt, [8, 9], "free"]]


def history(seed: int) -> list[Any]:
    """Random pushes between tiny pools under random faults; checks after every step, returns what happened."""
    random = Random(seed)
    kill = random.choice([0.0, 0.1])
    world = Loopback()
    faults = random_faults(seed, random.choice([0.1, 0.4]), SETTLE_S * 0.9, kill)
    world.network = Network(islice(faults, 40))
    size = {"num_pages": 6, "page_nbytes": 8, "planes": ["latent"]}
    senders = [world.site(f"prefill{i}", seed=seed + i, **size) for i in range(2)]
    receiver = world.site("decode", seed=seed + 9, **size)
    old, trace = [receiver.descriptor()], []
    kept: dict[int, str] = {}  # what pages hold that nobody outside may write to
    pushed: dict[int, list[str]] = {}
    abandoned: set[int] = set()

    def look() -> None:
        for attempt, pages, kind in receiver.poll():
            trace.append((round(world.network.now, 6), attempt, kind))
            if kind == "whole":
                assert receiver.pages(pages) == pushed[attempt] and attempt not in abandoned
            if kind == "free":
                receiver.fill(pages, random.randrange(256))
            if kind != "failed":
                kept.update(zip(pages, receiver.pages(pages)))
        assert not kept.keys() & set(receiver.held())
        assert {page: receiver.page(page) for page in kept} == kept

    kept.update(enumerate(receiver.pages(list(range(6)))))
    for _ in range(40):
        sender = random.choice(senders)
        free = [page for page in range(6) if page not in receiver.held()]
        remote = random.sample(free, min(len(free), random.randint(1, 3)))
        still = sorted(set(range(6)) - set(sender.lent()))
        if remote and len(still) >= len(remote):
            local = random.sample(still, len(remote))
            sender.fill(local[:1], random.randrange(256))
            attempt = receiver.open(remote)
            pushed[attempt] = sender.pages(local)
            for page in remote:
                del kept[page]
            descriptor = random.choice([*old, *[receiver.descriptor()] * 3])
            outcome = sender.push(descriptor, attempt, local, remote, random.uniform(0.05, 1.0))
            trace.append((attempt, outcome))
            if descriptor != receiver.descriptor() or outcome in ("stale", "unreachable"):
                receiver.gone(attempt)
            elif random.random() < 0.3:
                receiver.abandon(attempt)
                abandoned.add(attempt)
            if world.network.at(receiver.link.descriptor.address) is None:
                receiver = world.site("decode", receiver.link.descriptor.address, seed=seed + 9, **size)
                old.append(receiver.descriptor())
                pushed, abandoned, kept = {}, set(), dict(enumerate(receiver.pages(list(range(6)))))
        look()
        world.sleep(random.choice([0.0, 0.05, 0.3]))
        look()
    for _ in range(40):
        world.sleep(SETTLE_S / 4)
        look()
        epoch = receiver.link.descriptor.epoch
        running = {sent.attempt for sender in senders for sent in sender.link.running if sent.epoch == epoch}
        for attempt in pushed.keys() - running:
            receiver.gone(attempt)
    assert receiver.held() == [] and all(sender.lent() == [] for sender in senders)
    return trace


@pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, 200, 50)], ids=str)
def test_no_history_of_faults_brings_wrong_bytes_or_keeps_pages(seeds: range) -> None:
    traces = [history(seed) for seed in seeds]
    assert history(seeds[0]) == traces[0]
    seen = {entry[-1] for trace in traces for entry in trace}
    assert seen >= {"done", "late", "failed", "stale", "whole", "free"}
