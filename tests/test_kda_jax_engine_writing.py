"""Checkpoints on their way off the device: what they hold of it, and that all of a step's are written."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from engine_rigged import Rigged, fails_once
from engine_site import NAMESPACE, assert_cold, conserved
from engine_storm import Eager
from engine_tiers import eager, forget_device, prompt_of, written

from cache import KeyChain
from cache.tiers import page_name
from kda_jax.engine import Engine, ObjectStorage
from kda_jax.engine.copying import Copying
from transfer import MemoryObjects, withdraw


class Counted(Rigged):
    """Programs that know how many pieces there are on the device now, and how many there were at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live: set[int] = set()
        self.most, self.made = 0, 0
        self.after = self._count

    def _count(self, name: str, out: Any) -> Any:
        if name == "read_pages":
            self.made += 1
            self.live.add(self.made)
            self.most = max(self.most, len(self.live))
            weakref.finalize(out, self.live.discard, self.made)
        return out


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing comes to the host before this is set."""
    go, fill = threading.Event(), Copying._fill

    def waits(*args: Any) -> None:
        go.wait(30.0)
        fill(*args)

    monkeypatch.setattr(Copying, "_fill", waits)
    return go


def wait_for(made: Engine, what: Any) -> None:
    until = time.monotonic() + 30
    while not made._owner.ask(what):
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.mark.parametrize("most", [1, 3])
def test_copies_hold_no_more_of_the_device_than_is_said(
    most: int, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many checkpoints and of one that is larger than the bound; all are written when there is room."""
    monkeypatch.setattr("kda_jax.engine.copying.HELD", most)
    made = Counted()
    prompts = [prompt_of(seed, 450 if seed == 0 else 70) for seed in range(6)]
    with eager(programs=made, host_nbytes=2**22) as one:
        first = [one.submit(prompt, max_new_tokens=2).result(60.0).tokens for prompt in prompts]
        wait_for(one, lambda: one._slower.writing.copying.count)
        time.sleep(0.02)
        numbers = one.statistics()
        piece = made.moved_pages * made.layout.page_nbytes
        assert numbers.copying_nbytes == numbers.copying_most_nbytes == most * piece == len(made.live) * piece
        held.set()
        written(one)
        numbers = one.statistics()
        assert numbers.copying_nbytes == 0 and not made.live and 0 < made.most <= most < made.made
        assert numbers.written["host"] == len(one._loop._held) and not numbers.unwritten
        forget_device(one)
        for prompt, tokens in zip(prompts, first):
            again = one.generate([prompt], max_new_tokens=2)[0]
            assert again.tokens == tokens and again.usage.cached == {"host": len(prompt) // 64 * 64}
    conserved(one)


class Held(MemoryObjects):
    """A store that writes when it is let."""

    go: threading.Event

    def put(self, items: Any, timeout: float) -> list[Any]:
        self.go.wait(20.0)
        return super().put(items, timeout)


def end_together(one: Engine, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many checkpoints of three pages each are published before one of them is copied."""
    monkeypatch.setattr("kda_jax.engine.copying.PIECES", 0)
    one.generate([prompt_of(seed, 64) for seed in range(count)], max_new_tokens=1)
    wait_for(one, lambda: len(one._loop._held) == count)
    monkeypatch.undo()
    written(one)


@pytest.mark.parametrize(("count", "lost"), [(21, 0), (25, 4)], ids=["a quarter of the pool", "more"])
def test_checkpoints_that_end_together_wait_for_their_copy(
    count: int, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a step are written, as long as those that wait are a quarter of the pool's pages."""
    with eager(host_nbytes=2**22) as one:
        assert one.layout.num_pages // 4 == 3 * 21
        end_together(one, count, monkeypatch)
        assert one.statistics().written["host"] == count - lost
        assert one.statistics().unwritten == ({"host": lost} if lost else {})
    conserved(one)


def test_a_few_checkpoints_wait_however_large_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_jax.engine.writing.WAITING", 0.0)
    with eager(host_nbytes=2**22) as one:
        end_together(one, 18, monkeypatch)
        assert one.statistics().written == {"host": 16} and one.statistics().unwritten == {"host": 2}
    conserved(one)


@pytest.mark.parametrize("most", [2**32, 3000], ids=["all", "one"])
def test_what_a_slow_store_has_not_taken_waits_up_to_a_bound(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In host memory, and in nobody's way: its copies are over."""
    monkeypatch.setattr("kda_jax.engine.writing.UNSENT", most)
    with Held() as objects:
        objects.go = threading.Event()
        with eager(remote=objects) as one:
            one.generate([prompt_of(seed, 64) for seed in range(20)], max_new_tokens=1)
            kept = 20 if most == 2**32 else 1
            wait_for(one, lambda: len(one._loop._held) == 20 and not one._holder.store.pinned)
            wait_for(one, lambda: one._slower.writing._outstanding == kept)
            objects.go.set()
            written(one)
            assert one.statistics().written == {"remote": kept}
            assert one.statistics().unwritten == ({} if kept == 20 else {"remote": 19})
            one.generate([prompt_of(20, 64)], max_new_tokens=1)
            written(one)
            assert one.statistics().written == {"remote": kept + 1}, "there is room again"
        conserved(one)


class Alone(Eager):
    """Never looks what others have written."""

    def worth_searching(self, tokens: int) -> bool:
        return False


def test_what_another_engine_has_rounded_otherwise_serves_as_well() -> None:
    """It stays as it is, counts as written, and is not written again."""
    prompt, name = prompt_of(0, 130), NAMESPACE.digest()
    chain = KeyChain.start(name, 64).extend(prompt[:128])
    names = [page_name(chain.added[0]), f"state/{chain.key.hex()}"]
    with MemoryObjects() as objects:
        storage, other = ObjectStorage(objects, name, 5.0), {}
        with eager(remote=objects) as one:
            first = one.generate([prompt], max_new_tokens=3)[0]
            written(one)
        for each in names:
            other[each] = {
                leaf: np.nextafter(array, 1, dtype=array.dtype) if array.dtype == np.float32 else array
                for leaf, array in storage.read(each).items()
            }
            assert withdraw(objects, each, 5.0)
            storage.write(each, other[each])
        with eager(remote=objects, rates=Alone()) as one:
            for _ in range(2):
                forget_device(one)
                assert one.generate([prompt], max_new_tokens=3)[0].tokens == first.tokens
                written(one)
                assert one.statistics().written == {"remote": 2} and not one.statistics().unwritten
        for each, arrays in other.items():
            found = storage.read(each)
            assert all(np.array_equal(found[leaf], array) for leaf, array in arrays.items())
        with eager(remote=objects) as one:
            again = one.generate([prompt], max_new_tokens=3)[0]
            assert again.usage.cached == {"remote": 128} and not assert_cold(prompt, again.tokens, 3)


@pytest.mark.parametrize(("how", "lost"), [("read", 1), ("fetched", 2), ("both", 2)])
def test_a_copy_that_fails_on_its_way_is_given_up_once(
    how: str, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its first pieces; what comes after it is written, and nothing stays pinned or held. A prompt has two
    checkpoints of more than a piece; the first one read is lost, or whatever is fetched."""
    made, fill, calls = Rigged(), Copying._fill, []
    once = fails_once("read_pages")

    def spoil(name: str, *args: Any) -> None:
        calls.append(name)
        if how != "fetched" and calls.count("read_pages") == 2:
            once(name, *args)

    def fails(copying: Copying, copy: Any, pieces: list[jax.Array]) -> None:
        if how != "read" and copy.filled == 0 and len(copy.numbers) > made.moved_pages:
            raise MemoryError("no room on the host")
        fill(copying, copy, pieces)

    made.spoil = spoil
    monkeypatch.setattr(Copying, "_fill", fails)
    monkeypatch.setattr("kda_jax.engine.copying.PIECES", 1)
    with eager(programs=made, host_nbytes=2**22) as one:
        long, short = prompt_of(0, 500), prompt_of(1, 65)
        one.generate([long], max_new_tokens=1)
        written(one)
        numbers = one.statistics()
        assert numbers.unwritten == {"host": lost} and numbers.copying_nbytes == 0
        one.generate([short], max_new_tokens=1)
        written(one)
        forget_device(one)
        again = one.generate([short], max_new_tokens=3)[0]
        assert again.usage.cached == {"host": 64} and not assert_cold(short, again.tokens, 3)
    conserved(one)
