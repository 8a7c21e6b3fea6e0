"""The store: random histories under the laws, then single promises by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.stateful import run_state_machine_as_test
from immutables import Map

import rolling_model
from cache.errors import Conflict
from cache.payload import Sized, nbytes, same
from cache.retention.protocol import Boundary, Kind
from cache.shelf import Shelf
from cache.store import Store
from cache.tier import Tier
from cache_machine import StoreMachine, history_settings
from cache_site import NAMESPACE, ROW, STATE, Site, join, text
from oldest_first import OldestFirst

PAGE = 64


def test_random_histories_keep_the_laws(cache_steps: int) -> None:
    run_state_machine_as_test(StoreMachine, settings=history_settings(cache_steps))


def store_of(budget: int, policy: Any = OldestFirst(), **options: Any) -> Store:  # noqa: B008
    options = {"state_nbytes": STATE, "row_nbytes": ROW, "page": PAGE, "share": 1.0, **options}
    return Store.empty({Tier.DEVICE: budget}, policy, **options)


def put(store: Store, run: rolling_model.Run, tokens: np.ndarray, boundary: int) -> Store:
    state, pages = run.checkpoint(boundary, PAGE)
    return store.put(NAMESPACE, tokens[:boundary], state, pages, kind=Kind.PROMPT_END, now=0.0)


def resume(store: Store, tokens: np.ndarray, boundary: int) -> rolling_model.Run:
    """The model over all tokens, from the checkpoint at a boundary."""
    key = store.match(NAMESPACE, tokens[:boundary]).boundaries[-1].key
    assert key is not None
    shelf, index = store.shelves[Tier.DEVICE], store.prompts.index(key)
    path = [node for _, node in index.ancestors(store.prompts.places[key].node)][::-1]
    pages = [shelf.pages[name] for node in path for name in node.names]
    return rolling_model.run(rolling_model.resumed(boundary, shelf.states[key], pages), tokens[boundary:])


# a published checkpoint never changes


def test_producer_and_consumers_diverge_from_one_checkpoint() -> None:
    """4,096 tokens; the producer goes on by 64, and so do three consumers, each with other tokens."""
    trunk = text(4096)
    run = rolling_model.run(rolling_model.start(NAMESPACE), trunk)
    store = put(store_of(10**6), run, trunk, 4096)
    for seed in range(4):
        longer = join(trunk, text(64, seed + 1))
        cold = rolling_model.run(rolling_model.start(NAMESPACE), longer)
        resumed = resume(store, longer, 4096)
        assert resumed.answer == cold.answer
        store = put(store, resumed, longer, 4160)
    assert store.counts.puts == 5
    assert len(store.shelves[Tier.DEVICE].pages) == 64 + 4


def test_a_prompt_that_shares_an_odd_number_of_tokens() -> None:
    """401 tokens, of which another prompt shares 384 + 17."""
    first = text(401)
    cold = rolling_model.run(rolling_model.start(NAMESPACE), first)
    store = put(store_of(10**6), cold, first, 384)
    second = join(first, text(30, 1))
    assert store.match(NAMESPACE, second).length == 384
    assert (
        resume(store, second, 384).answer == rolling_model.run(rolling_model.start(NAMESPACE), second).answer
    )


def test_ownership_passes_to_the_store_without_a_copy() -> None:
    state, page = {"recurrent": jnp.ones((4, 4))}, {"latent": jnp.ones((PAGE, 2))}
    store = store_of(10**6).put(NAMESPACE, text(PAGE), state, [page], kind=Kind.PROMPT_END, now=0.0)
    (held,), (rows,) = store.shelves[Tier.DEVICE].states.values(), store.shelves[Tier.DEVICE].pages.values()
    assert held["recurrent"] is state["recurrent"]  # type: ignore[index]
    assert rows["latent"] is page["latent"]  # type: ignore[index]
    assert store.stats().tiers[Tier.DEVICE].nbytes == 64 + PAGE * 8


def test_the_same_bytes_again_change_nothing_and_other_bytes_are_an_error() -> None:
    tokens = text(PAGE)
    state = {"a": np.arange(4, dtype=np.float32), "b": np.array([np.nan, 1.0])}
    store = store_of(10**6)
    store = store.put(NAMESPACE, tokens, state, [Sized(PAGE)], kind=Kind.PROMPT_END, now=0.0)
    equal = {name: array.copy() for name, array in state.items()}
    assert store.put(NAMESPACE, tokens, equal, [Sized(PAGE)], kind=Kind.MARK, now=1.0) is store
    others: list[dict[str, Any]] = [
        {**state, "a": state["a"] + 1},
        {**state, "a": state["a"].astype(np.float64)},
        {**state, "a": state["a"].view(np.int32)},
        {**state, "a": state["a"].reshape(2, 2)},
        {"a": state["a"]},
        {**state, "c": state["a"]},
        {**state, "a": np.array([-0.0, 1, 2, 3], np.float32)},
    ]
    for other in others:
        with pytest.raises(Conflict, match="tier device holds") as caught:
            store.put(NAMESPACE, tokens, other, [Sized(PAGE)], kind=Kind.PROMPT_END, now=1.0)
        assert caught.value.tier is Tier.DEVICE
        assert caught.value.key in store.prompts.places
    assert store.counts.puts == 1


def test_payloads_compare_by_their_bytes() -> None:
    x = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert same({"x": x}, {"x": np.asfortranarray(x)})
    assert same({"x": jnp.asarray(x)}, {"x": x})
    assert same(Sized(3), Sized(3)) and not same(Sized(3), Sized(4)) and not same(Sized(12), {"x": x})
    assert nbytes({"x": x, "y": jnp.zeros(3)}) == 24
    with pytest.raises(TypeError, match="named arrays or has nbytes, got int"):
        nbytes(24)  # pyright: ignore[reportArgumentType]


# what is kept


class Listening(OldestFirst):
    """A policy that writes down what it is told, in the order of telling."""

    heard: list[tuple] = []  # noqa: RUF012

    def made(self, boundary: Boundary, now: float) -> Listening:
        self.heard.append(("made", boundary))
        return self

    def used(self, path, hit, now) -> Listening:  # type: ignore[override]
        self.heard.append(("used", tuple(path), hit, now))
        return self

    def held(self, key: bytes, now: float) -> Listening:
        self.heard.append(("held", key))
        return super().held(key, now)  # type: ignore[return-value]

    def dropped(self, key: bytes, now: float) -> Listening:
        self.heard.append(("dropped", key))
        return super().dropped(key, now)  # type: ignore[return-value]

    def forgotten(self, key: bytes) -> Listening:
        self.heard.append(("forgotten", key))
        return super().forgotten(key)  # type: ignore[return-value]


@pytest.fixture
def heard() -> Iterator[list[tuple]]:
    Listening.heard.clear()
    yield Listening.heard
    Listening.heard.clear()


def test_what_a_policy_hears(heard: list[tuple]) -> None:
    site, tokens = Site(), text(4096)
    site.store = store_of(10**6, Listening())
    root = site.put(tokens[:1024])
    tip = site.put(tokens[:4096])
    branch = site.put(tokens[:2048], kind=Kind.BRANCH)
    behind = site.put(tokens[:3072], kind=Kind.MARK)
    assert [boundary for event, boundary, *_ in heard if event == "made"] == [
        Boundary(root, 1024, None, (), Kind.PROMPT_END, 0, STATE, ROW),
        Boundary(tip, 4096, root, (), Kind.PROMPT_END, 1, STATE, ROW),
        Boundary(branch, 2048, root, (tip,), Kind.BRANCH, 1, STATE, ROW),
        Boundary(behind, 3072, branch, (tip,), Kind.MARK, 1, STATE, ROW),
    ]
    heard.clear()
    prompt = join(tokens[:3000], text(10, 1))
    seen = site.store.match(NAMESPACE, prompt)
    plan = site.plan(prompt)
    site.store = site.store.used(seen, plan.key, 5.0).drop(branch, Tier.DEVICE, 6.0).forget(0)
    assert heard == [("used", (root, branch), branch, 5.0), ("dropped", branch), ("forgotten", branch)]


def test_only_the_boundary_that_was_used_is_refreshed() -> None:
    site, tokens = Site(), text(4096)
    keys = [site.put(tokens[:boundary]) for boundary in (1024, 2048, 4096)]
    before = {key: site.store.prompts.node(key).last_use for key in keys}
    site.now = 9.0
    site.serve(join(tokens[:2048], text(20, 1)))
    after = {key: site.store.prompts.node(key).last_use for key in keys}
    assert {key for key in keys if before[key] != after[key]} == {keys[1]}
    assert site.store.shelves[Tier.DEVICE].policy.worth(keys[1], 0.0) == 10.0


def test_a_look_changes_nothing() -> None:
    site, tokens = Site(), text(4096)
    site.put(tokens)
    before = site.store
    site.store.match(NAMESPACE, tokens[:1000])
    site.plan(tokens)
    assert site.store is before


def test_dropping_a_checkpoint_keeps_the_latents_that_others_need_and_no_more() -> None:
    site, tokens = Site(), text(4096)
    keys = [site.put(tokens[:boundary]) for boundary in (1024, 4096)]
    store = site.store.drop(keys[0], Tier.DEVICE, 1.0)
    assert store.stats().tiers[Tier.DEVICE][:3] == (1, 64, STATE + 4096)
    seen = store.match(NAMESPACE, tokens[:3000])
    assert (seen.covered(), store.plan(seen, 3000, site.limits).boundary) == (2944, 0)
    assert [each.boundary for each in store.plan(seen, 3000, site.limits).missing] == [1024, 2944]
    store = site.store.drop(keys[1], Tier.DEVICE, 1.0)
    assert store.stats().tiers[Tier.DEVICE][:3] == (1, 16, STATE + 1024)
    assert store.drop(keys[1], Tier.DEVICE, 1.0) is store


def test_no_more_is_evicted_than_necessary() -> None:
    site = Site()
    for seed in range(8):
        site.now = float(seed)
        site.put(text(64, seed))
    for num_bytes, gone in [(0, 0), (1, 1), (STATE + 64, 1), (STATE + 65, 2), (10**6, 8)]:
        store = site.store.evict(Tier.DEVICE, num_bytes, 9.0)
        assert (store.counts.evicted, store.stats().tiers[Tier.DEVICE].checkpoints) == (gone, 8 - gone)


def test_a_put_into_a_full_tier_gives_up_what_was_used_longest_ago() -> None:
    site = Site(budgets={Tier.DEVICE: 3 * (STATE + 64)})
    keys = []
    for seed in range(5):
        site.now = float(seed)
        keys.append(site.put(text(64, seed)))
    assert set(site.store.shelves[Tier.DEVICE].states) == set(keys[2:])
    assert site.store.counts == (5, 0, 2, 0)


def test_one_huge_prompt_cannot_flush_what_others_use() -> None:
    site = Site(budgets={Tier.DEVICE: 20_000}, share=0.5)
    others = [site.put(text(1024, seed)) for seed in range(4)]
    huge = site.put(text(9600, 9))
    assert set(site.store.shelves[Tier.DEVICE].states) == set(others)
    assert site.store.counts.skipped == 1
    assert huge in site.store.prompts.places
    assert site.put(text(8960, 10)) in site.store.shelves[Tier.DEVICE].states


def test_bytes_are_conserved_over_ten_thousand_operations() -> None:
    rng = np.random.default_rng(3)
    site = Site(budgets={Tier.DEVICE: 30_000, Tier.HOST: 10_000}, grid=16, page=16)
    trunk, pinned = text(2000), []
    for step in range(10_000):
        site.now, act = float(step), rng.integers(0, 8)
        keys = list(site.store.prompts.places)
        if act < 4 or not keys:
            cut = int(rng.integers(1, 2000))
            tokens = join(trunk[:cut], text(int(rng.integers(1, 100)), int(rng.integers(1, 5))))
            tier = Tier.DEVICE if act < 3 else Tier.HOST
            pages = [Sized(16)] * (len(tokens) // 16)
            site.store = site.store.put(
                NAMESPACE, tokens, Sized(STATE), pages, kind=Kind.MARK, now=site.now, tier=tier
            )
        elif act == 4:
            pinned.append(keys[rng.integers(len(keys))])
            site.store = site.store.pin(pinned[-1])
        elif act == 5 and pinned:
            site.store = site.store.unpin(pinned.pop(int(rng.integers(len(pinned)))))
        elif act == 6:
            site.store = site.store.drop(keys[rng.integers(len(keys))], Tier.DEVICE, site.now)
        else:
            site.store = site.store.evict(Tier.HOST, 2000, site.now).forget(50)
    for shelf in site.store.shelves.values():
        assert shelf.nbytes == STATE * len(shelf.states) + 16 * len(shelf.pages) <= shelf.budget
    for key in pinned:
        site.store = site.store.unpin(key)
    site.store = site.store.evict(Tier.DEVICE, 10**9, 0.0).evict(Tier.HOST, 10**9, 0.0).forget(0)
    assert [shelf.nbytes for shelf in site.store.shelves.values()] == [0, 0]
    assert len(site.store.prompts.indexes[NAMESPACE].nodes) == 1


def test_a_new_session_copies_a_few_nodes_however_many_there_are() -> None:
    site, new = Site(), []
    for seed in range(600):
        before = site.store.prompts
        site.put(text(100, seed))
        if seed in (50, 550):
            old = before.indexes[NAMESPACE].nodes
            index = site.store.prompts.indexes[NAMESPACE]
            new.append([at for at, node in index.nodes.items() if old.get(at) is not node])
    assert [len(nodes) for nodes in new] == [2, 2]


# what is refused


def test_a_put_without_the_pages_that_the_tier_lacks_is_refused_and_leaves_nothing() -> None:
    site, tokens = Site(), text(1024)
    site.put(tokens[:512])
    before = site.store
    arguments: dict[str, Any] = {"kind": Kind.PROMPT_END, "now": 0.0}
    with pytest.raises(
        ValueError, match="8 pages before the boundary are not held here, got 7: pass them all"
    ):
        before.put(NAMESPACE, tokens, Sized(STATE), [Sized(64)] * 7, **arguments)
    assert before.put(NAMESPACE, tokens, Sized(STATE), [Sized(64)] * 8, **arguments).counts.puts == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s: s.put(NAMESPACE, [1], Sized(1), kind=Kind.MARK, now=0.0, tier=Tier.DISK),
            "no tier disk here",
        ),
        (lambda s: s.put(NAMESPACE, [], Sized(1), kind=Kind.MARK, now=0.0), "has tokens before it"),
        (lambda s: s.put(NAMESPACE, [-1], Sized(1), kind=Kind.MARK, now=0.0), "token ids lie in"),
        (lambda s: s.plan(s.match(NAMESPACE, []), 0, Site().limits), "num_tokens=0"),
        (lambda s: store_of(-1), "budget=-1"),
        (lambda s: store_of(1, share=0.0), "share=0.0"),
        (lambda s: store_of(1, page=0), "page=0"),
        (lambda s: Store.empty({}, OldestFirst(), state_nbytes=1, row_nbytes=1), r"budgets=\{\}"),
    ],
    ids=["tier", "no tokens", "tokens", "no prompt", "budget", "share", "page", "no tier"],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(store_of(1000))


def test_a_shelf_counts_each_payload_once() -> None:
    shelf = Shelf.empty(100, OldestFirst()).add(b"k", Sized(10), {b"p": Sized(3)}, 0.0)
    assert (shelf.nbytes, shelf.excess, shelf._replace(budget=12).excess) == (13, 0, 1)
    assert shelf.discard(b"k", (b"p",), 0.0) == Shelf.empty(100, OldestFirst())
    assert shelf.pages == Map({b"p": Sized(3)})
