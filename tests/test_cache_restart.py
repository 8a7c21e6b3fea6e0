"""A store that is saved and restored is the store that it was, less what the disk has lost."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

import cache.files
import cache.restart
import rolling_model
from cache import Holder, InMemory, Limits, Media, Namespace, Sized, Store, Tier, load, place, restore, save
from cache.files import packed, unpacked
from cache.keys import KeyChain
from cache.payload import Payload, same
from cache.placement import Placed
from cache.retention import Boundary, Creation, Kind, Learned, policy
from cache.tiers import Storages, promote
from cache_laws import contents
from cache_machine import StoreMachine, history_settings

PAGE = 4
NAMESPACES = [Namespace(weights=b"w", tokenizer=b"t", salt=salt).digest() for salt in (b"", b"other")]
MEMORY: dict[Tier, Any] = {tier: InMemory() for tier in Tier}
BUDGETS = {Tier.DEVICE: 1500, Tier.HOST: 2500}
IMAGE = Media(1, b"an image")


class Server:
    """Serves random prompts of a rolling model through a store."""

    def __init__(self, name: str = "ours", budgets: dict[Tier, int] = BUDGETS) -> None:
        sizes = {"state_nbytes": rolling_model.STATE_NBYTES, "row_nbytes": rolling_model.ROW_NBYTES}
        self.empty = partial(Store.empty, budgets, policy(name), page=PAGE, share=1.0, **sizes)  # type: ignore[arg-type]
        self.holder, self.now, self.limits = Holder(self.empty()), 0.0, Limits(grid=2)
        self.asked: list[tuple[bytes, tuple[int, ...], tuple[Media, ...]]] = []

    @property
    def store(self) -> Store:
        return self.holder.store

    def serve(self, seed: int, count: int) -> list[tuple[int, tuple[Placed, ...]]]:
        """Prompts that often go on from others; what each resumed from and made."""
        rng, answers = np.random.default_rng(seed), []
        for _ in range(count):
            self.now += float(rng.integers(1, 40))
            namespace, tokens, media = NAMESPACES[rng.integers(2)], (), (IMAGE,) * int(rng.integers(2))
            if self.asked and rng.random() < 0.7:
                namespace, before, media = self.asked[rng.integers(len(self.asked))]
                tokens = before[: max(2, rng.integers(len(before) + 1))]
            tokens = (*tokens, *map(int, rng.integers(0, 5, rng.integers(2, 12))))
            self.asked.append((namespace, tokens, media))
            seen = self.store.match(namespace, tokens, media)
            plan = self.store.plan(seen, len(tokens), self.limits)
            self.holder.update(lambda s, seen=seen, plan=plan: s.used(seen, plan.key, self.now))
            made = place(plan, len(tokens), self.limits, Creation())
            for boundary, kind in made:
                self.put(namespace, tokens[:boundary], media, kind)
            if rng.random() < 0.3 and plan.key is not None:
                promote(self.holder, plan.key, Tier.HOST, MEMORY, self.now)
            answers.append((plan.boundary, made))
        return answers

    def put(self, namespace: bytes, tokens: tuple[int, ...], media: tuple[Media, ...], kind: Kind) -> None:
        run = rolling_model.run(rolling_model.start(namespace + bytes(len(media))), tokens)
        state, pages = run.checkpoint(len(tokens), PAGE)
        self.holder.update(
            lambda s: s.put(namespace, tokens, state, pages, kind=kind, now=self.now, media=media)
        )

    def again(self, folder: Path, later: float = 0.0) -> Server:
        """Another server after a restart, whose clock is `later`."""
        other = Server.__new__(Server)
        other.__dict__ |= {**self.__dict__, "asked": list(self.asked), "now": self.now + later}
        other.holder = Holder(restore(folder, self.empty(), MEMORY, self.now + later))
        return other


def held(store: Store) -> dict[Tier, object]:
    """All bytes of each tier by name, and the order in which they would go."""
    return {
        tier: (contents(shelf.states), contents(shelf.pages), shelf.nbytes)
        for tier, shelf in store.shelves.items()
    }


def orders(store: Store, now: float) -> dict[Tier, list[bytes]]:
    return {tier: list(shelf.policy.victims(10**9, now)) for tier, shelf in store.shelves.items()}


@pytest.fixture
def served() -> Server:
    server = Server()
    server.serve(1, 40)
    return server


@pytest.mark.parametrize("later", [0.0, -500.0, 1e6], ids=["same-clock", "clock-from-zero", "later"])
@pytest.mark.parametrize("name", ["ours", "lru", "path_cap:2"])
def test_a_restored_store_is_the_one_that_was_saved(name: str, later: float, tmp_path: Path) -> None:
    server = Server(name)
    server.serve(2, 60)
    assert server.store.counts.evicted > 5 and len(server.store.shelves[Tier.HOST].states) > 5
    saved = save(server.store, tmp_path, MEMORY, server.now)
    other = server.again(tmp_path, later)
    assert held(other.store) == held(server.store)
    assert orders(other.store, other.now) == orders(server.store, server.now)
    assert other.store.stats()[:3] == server.store.stats()[:3] and other.store.counts.lost == saved.lost == 0
    assert saved.nbytes == sum(
        path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and len(path.name) == 64
    )
    for namespace, tokens, media in server.asked:
        views = [each.store.match(namespace, (*tokens, 1), media) for each in (server, other)]
        assert views[0] == views[1]
    for key, place_ in server.store.prompts.places.items():
        again = other.store.prompts.places[key]
        assert (place_.kind, place_.turn, place_.namespace) == (again.kind, again.turn, again.namespace)
        assert other.store.prompts.node(key).last_use == server.store.prompts.node(key).last_use + later


@pytest.mark.parametrize("later", [0.0, -500.0, 500.0], ids=["same-clock", "earlier-clock", "later-clock"])
@pytest.mark.parametrize("name", ["ours", "lru"])
def test_it_goes_on_as_if_it_had_never_stopped(name: str, later: float, tmp_path: Path) -> None:
    """The same requests then resume from the same boundaries, make the same ones and push out the same ones."""
    server = Server(name)
    server.serve(3, 60)
    save(server.store, tmp_path, MEMORY, server.now)
    other = server.again(tmp_path, later)
    assert server.serve(4, 60) == other.serve(4, 60)
    assert held(other.store) == held(server.store)
    assert orders(other.store, other.now) == orders(server.store, server.now)


def test_what_was_learned_goes_on_from_its_numbers(served: Server, tmp_path: Path) -> None:
    save(served.store, tmp_path, MEMORY, served.now)
    other = served.again(tmp_path, later=-100.0)
    for tier, shelf in served.store.shelves.items():
        before, after = shelf.policy, other.store.shelves[tier].policy
        assert isinstance(before, Learned) and isinstance(after, Learned)
        assert before.creation == after.creation
        one, two = before.saved(), after.saved()
        for values in two["remembered"].values():
            values[1] += 100.0  # its last use
        assert one["remembered"] == two["remembered"] and one["table"] == two["table"]
        for one, two in zip(before.learned()["rates"], after.learned()["rates"], strict=True):
            assert one["class"] == two["class"]
            np.testing.assert_allclose(one["uses"], two["uses"])
            np.testing.assert_allclose(one["seconds"], two["seconds"], rtol=1e-9, atol=1e-6)
        for key in shelf.states:
            np.testing.assert_allclose(before.worth(key, served.now), after.worth(key, other.now), rtol=1e-9)


def test_a_boundary_stays_in_its_class_when_another_was_made_before_it() -> None:
    """A prompt of 5,000 tokens, then a fork 100 tokens before its end: to its class, the end lies 5,000 behind."""
    end = Boundary(b"end", 5000, None, (), Kind.PROMPT_END, 0, 1, 1)
    fork = Boundary(b"fork", 4900, None, (b"end",), Kind.BRANCH, 0, 1, 1)
    before = Learned().made(end, 1.0).made(fork, 2.0)
    boundaries = [fork._replace(children=()), end._replace(parent=b"fork")]
    after = Learned().restored(before.saved(), boundaries, (), 0.0)
    learned = [each.used((b"fork", b"end"), None, 9.0).learned()["rates"] for each in (before, after)]
    assert [each["class"] for each in learned[0]] == [each["class"] for each in learned[1]]
    assert ["prompt_end", 0, 0, 1, 4] in [each["class"] for each in learned[0]]


@pytest.mark.parametrize(
    "leaf",
    [
        *(np.arange(-6, 6).reshape(3, 4).astype(dtype) for dtype in ("int8", "float32", "float16", "bool")),
        np.arange(6).astype(ml_dtypes.bfloat16),
        np.arange(6).astype(ml_dtypes.float8_e4m3fn),
        np.arange(6).astype(ml_dtypes.float8_e5m2),
        np.arange(6).astype(ml_dtypes.int4),
        np.array(3.0, np.float32),
        np.zeros((0, 5), np.float32),
        np.full(3, np.nan, np.float32),
        np.arange(12.0, dtype=np.float32).reshape(3, 4).T,
        jnp.arange(5, dtype=jnp.bfloat16),
    ],
    ids=lambda leaf: f"{leaf.dtype}{list(leaf.shape)}",
)
def test_leaves_of_every_dtype_and_shape_survive(leaf: Any) -> None:
    payload = {"first": np.ones(3, np.int8), "leaf": leaf, "last": np.arange(7, dtype=np.int32)}
    again = unpacked(packed(payload))
    assert list(again) == list(payload) and same(again, {k: np.asarray(v) for k, v in payload.items()})


@pytest.mark.parametrize(
    "payload",
    [Sized(8), {"a": np.array([None])}, {"a": np.zeros(2, "i4,i4")}, {"a": np.zeros(2, ">i4")}],
    ids=["no-arrays", "objects", "records", "byte-order"],
)
def test_what_a_file_cannot_hold_is_refused_and_nothing_is_saved(payload: Payload, tmp_path: Path) -> None:
    store = Server().store.put(NAMESPACES[0], [1], payload, kind=Kind.MARK, now=0.0)
    with pytest.raises(ValueError, match=r"only named arrays|which has no name of its own"):
        save(store, tmp_path, MEMORY, 1.0)
    assert not list(tmp_path.iterdir())


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [remove, truncate, flip])
def test_a_damaged_file_costs_its_own_entries_only(
    damage: Callable[[Path], None], served: Server, tmp_path: Path
) -> None:
    """Each file in turn: exactly the checkpoints that need it are gone, and they are counted and remembered."""
    store = served.store
    save(store, tmp_path / "whole", MEMORY, served.now)
    files = [
        path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()
    ]
    assert len(files) > 40
    losses = set()
    for file in files:
        shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
        damage(tmp_path / "damaged" / file)
        after = restore(tmp_path / "damaged", served.empty(), MEMORY, served.now)
        shutil.rmtree(tmp_path / "damaged")
        expected = {
            (tier, key)
            for tier, shelf in store.shelves.items()
            for key in shelf.states
            for part in (shelf.states[key], *(shelf.pages[name] for name in pages_of(store, key)))
            if cache.files.digest(packed(part)).hex() == file.name
        }
        gone = {
            (t, k)
            for t, shelf in store.shelves.items()
            for k in set(shelf.states) - set(after.shelves[t].states)
        }
        assert gone == expected and after.counts.lost == len(expected)
        assert set(after.prompts.places) == set(store.prompts.places)
        for tier, shelf in after.shelves.items():
            assert all(same(state, store.shelves[tier].states[key]) for key, state in shelf.states.items())
            assert all(same(page, store.shelves[tier].pages[name]) for name, page in shelf.pages.items())
            needed = {name for key in shelf.states for name in pages_of(after, key)}
            assert set(shelf.pages) == needed
            assert sorted(shelf.policy.victims(10**9, served.now)) == sorted(shelf.states)
        losses.add(len(expected))
    assert 0 in losses and max(losses) > 2  # an index, and a page that many need


def pages_of(store: Store, key: bytes) -> list[bytes]:
    path = store.prompts.index(key).ancestors(store.prompts.places[key].node)
    return [name for _, node in path for name in node.names]


def test_without_an_index_the_version_before_is_used_or_else_none(served: Server, tmp_path: Path) -> None:
    save(served.store, tmp_path, MEMORY, served.now)
    (first,) = tmp_path.iterdir()
    shutil.copytree(first, tmp_path / "00000002")
    for index in (tmp_path / "00000002").glob("index.*"):
        flip(index)
    after = restore(tmp_path, served.empty(), MEMORY, served.now)
    assert held(after) == held(served.store) and after.counts.lost == 1
    for index in first.glob("index.*"):
        truncate(index)
    after = restore(tmp_path, served.empty(), MEMORY, served.now)
    assert not after.prompts.places and after.counts.lost == 2


@pytest.mark.parametrize("end", [OSError, KeyboardInterrupt, None], ids=["error", "interrupt", "killed"])
def test_an_interrupted_save_leaves_the_one_before(
    end: type[BaseException] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever sync or rename it is that fails; a process that is killed cleans nothing up either."""
    server, stages, done = Server(), 0, False
    server.serve(1, 4)
    save(server.store, tmp_path, MEMORY, server.now)
    before, now, rename = held(server.store), server.now, Path.rename
    server.serve(5, 4)
    assert held(server.store) != before

    def step(left: list[int]) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise (end or OSError)("no space left on device")

    def renamed(left: list[int], path: Path, target: Path) -> None:
        step(left)
        rename(path, target)

    while not done:
        left = [stages]
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", lambda opened, left=left: step(left))
            patched.setattr(Path, "rename", lambda path, target, left=left: renamed(left, path, target))
            if end is None:
                patched.setattr(shutil, "rmtree", lambda path, **_: None)
            try:
                save(server.store, tmp_path, MEMORY, server.now)
                done = True
            except (OSError, KeyboardInterrupt):
                stages += 1
        newest = cache.files.versions(tmp_path)[0].name
        if newest == "00000001":
            assert held(restore(tmp_path, server.empty(), MEMORY, now)) == before
        else:  # all was written; only the sync of the rename itself can have failed
            assert done or left == [-1]
            assert held(restore(tmp_path, server.empty(), MEMORY, server.now)) == held(server.store)
            break
    assert stages > 15
    save(server.store, tmp_path, MEMORY, server.now)
    assert len(list(tmp_path.iterdir())) == 1
    assert held(server.again(tmp_path).store) == held(server.store)


def test_a_smaller_budget_keeps_what_is_worth_most(served: Server, tmp_path: Path) -> None:
    save(served.store, tmp_path, MEMORY, served.now)
    smaller = Server("ours", {Tier.DEVICE: 700})
    after = restore(tmp_path, smaller.empty(), MEMORY, served.now)
    shelf = after.shelves[Tier.DEVICE]
    order = orders(served.store, served.now)[Tier.DEVICE]
    assert shelf.nbytes <= 700 and order[-1] in shelf.states
    assert after.counts.skipped == len(order) - len(shelf.states) > 0
    kept = [key in shelf.states for key in order]
    assert sum(kept[len(kept) // 2 :]) > sum(kept[: len(kept) // 2])


def test_payloads_come_from_storage_and_go_to_storage(served: Server, tmp_path: Path) -> None:
    """What the store keeps of a tier is what its storage returns; what that cannot read is lost, and only that."""

    class Elsewhere:
        def __init__(self) -> None:
            self.objects: dict[str, Payload] = {}

        def write(self, name: str, payload: Payload) -> Payload:
            self.objects[name] = payload
            return Sized(sum(each.nbytes for each in payload.values()))  # type: ignore[union-attr]

        def read(self, name: str, kept: Payload | None) -> Payload:
            if name not in self.objects:
                raise OSError("not found")
            return self.objects[name]

    first, second = Elsewhere(), Elsewhere()
    storages: Storages = {Tier.DEVICE: InMemory(), Tier.HOST: InMemory(), Tier.DISK: first}
    server = Server("ours", {**BUDGETS, Tier.DISK: 10**6})
    server.serve(6, 20)
    keys = list(server.store.shelves[Tier.DEVICE].states)
    assert all(promote(server.holder, key, Tier.DISK, storages, server.now) for key in keys)
    lost = next(name for name in first.objects if name.startswith("state/"))
    del first.objects[lost]
    assert save(server.store, tmp_path, storages, server.now).lost == 1
    after = restore(tmp_path, server.empty(), {**storages, Tier.DISK: second}, server.now)
    assert {f"state/{key.hex()}" for key in after.shelves[Tier.DISK].states} == {
        f"state/{key.hex()}" for key in keys
    } - {lost}
    assert set(second.objects) <= set(first.objects)
    assert all(same(first.objects[name], second.objects[name]) for name in second.objects)
    resumed = 0
    for namespace, tokens, media in server.asked:
        plan = after.plan(after.match(namespace, tokens, media), len(tokens), Limits(tiers=Tier.DISK.bit))
        if plan.boundary:
            chain = KeyChain.start(namespace, PAGE).extend(tokens[: plan.boundary], media)
            loaded = load(after, plan, chain, {Tier.DISK: second})
            run = rolling_model.resumed(plan.boundary, loaded.state, loaded.pages)
            cold = rolling_model.run(rolling_model.start(namespace + bytes(len(media))), tokens)
            assert rolling_model.run(run, tokens[plan.boundary :]).answer == cold.answer
            resumed += 1
    assert resumed > 5


def test_what_does_not_fit_together_is_refused(served: Server, tmp_path: Path) -> None:
    assert restore(tmp_path / "none", served.empty(), MEMORY, 0.0).stats().remembered == 0
    save(served.store, tmp_path, MEMORY, served.now)
    with pytest.raises(ValueError, match="into an empty store, got one with"):
        restore(tmp_path, served.store, MEMORY, 0.0)
    other = Store.empty(BUDGETS, policy("ours"), state_nbytes=1, row_nbytes=1, page=8)
    with pytest.raises(ValueError, match="pages of 4 rows, this one of 8"):
        restore(tmp_path, other, MEMORY, 0.0)


class RestartMachine(StoreMachine):
    """Random histories in which processes end and others go on."""

    policy = Learned()

    @precondition(lambda self: self.store.prompts.places)
    @rule()
    def restart(self) -> None:
        before = self.store
        with tempfile.TemporaryDirectory() as folder:
            save(before, folder, self.storages, self.now)
            self.holder = Holder(restore(folder, self.empty(), self.storages, self.now))
        self.pins.clear()
        after = self.store
        assert set(after.prompts.places) == set(before.prompts.places)
        for tier, shelf in before.shelves.items():
            again = after.shelves[tier]
            assert set(again.states) <= set(shelf.states)
            if not self.faulty[tier].broken and not self.faulty[tier].full:
                assert set(again.states) == set(shelf.states)
                then, now = (
                    [each.policy.worth(key, self.now) for key in shelf.states] for each in (shelf, again)
                )
                np.testing.assert_allclose(now, then, rtol=1e-9)


def test_histories_with_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda opened: None)
    run_state_machine_as_test(RestartMachine, settings=history_settings(1000))
