"""States in int8 where they wait: quantised once, copied as they are, expanded for each request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from cache import (
    Compressing,
    Compression,
    Conflict,
    Holder,
    InMemory,
    KeyChain,
    Limits,
    Loaded,
    Namespace,
    Sized,
    Store,
    Tier,
    demote,
    load,
    promote,
    restore,
    save,
)
from cache.payload import nbytes, same
from cache.retention import Kind, policy
from pallas_kernels.state_compression import CompressedState, compress_state, decompress_state

H, K, V = 2, 4, 64
NAMESPACE = Namespace(weights=b"w", tokenizer=b"t", state_dtype="int8").digest()
TOKENS = np.arange(10)
LEAVES = frozenset({"0.recurrent", "2.recurrent"})
BUDGETS: dict[Tier, int] = dict.fromkeys((Tier.DEVICE, Tier.HOST, Tier.DISK), 10**6)


def state(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    leaves = {leaf: rng.normal(0, 10, (H, K, V)).astype(np.float32) for leaf in sorted(LEAVES)}
    return {**leaves, "0.conv": rng.normal(size=(3, 8)).astype(np.float32), "tail": np.ones(2, np.float32)}


class Counting:
    """Plain rounding, of which values times scales is no fixed point: quantised twice, it shows."""

    def __init__(self) -> None:
        self.compressed = self.expanded = 0

    def compress(self, leaf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.compressed += 1
        scales = np.abs(leaf).max(-1) / np.float32(100.3)
        return np.round(leaf / scales[..., None]).astype(np.int8), scales

    def expand(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        self.expanded += 1
        return values.astype(np.float32) * scales[..., None]


class Site:
    """One checkpoint on the device; host and disk compress."""

    def __init__(self) -> None:
        self.counting = Counting()
        self.compression = Compression(
            leaves=LEAVES, compress=self.counting.compress, expand=self.counting.expand
        )
        slow = Compressing(InMemory(), self.compression)
        self.storages = {Tier.DEVICE: InMemory(), Tier.HOST: slow, Tier.DISK: slow}
        self.holder = Holder(self.empty())
        self.pages = [{"latent": np.arange(4.0) + page} for page in range(2)]
        self.holder.update(lambda s: s.put(NAMESPACE, TOKENS, state(), self.pages, kind=Kind.MARK, now=0.0))
        self.chain = KeyChain.start(NAMESPACE, 4).extend(TOKENS)
        self.key = self.chain.key

    def empty(self) -> Store:
        return Store.empty(BUDGETS, policy("lru"), state_nbytes=1, row_nbytes=1, page=4)

    def held(self, tier: Tier) -> Any:
        return self.holder.store.shelves[tier].states[self.key]

    def load(self, tier: Tier) -> Loaded:
        store, prompt = self.holder.store, np.append(TOKENS, 1)
        plan = store.plan(store.match(NAMESPACE, prompt), len(prompt), Limits(tiers=tier.bit))
        return load(store, plan, self.chain, self.storages, self.compression.expanded)


def test_a_demoted_state_is_small_and_comes_back_expanded() -> None:
    site = Site()
    assert demote(site.holder, site.key, Tier.DEVICE, site.storages, 1.0)
    small = site.held(Tier.HOST)
    assert {leaf: small[leaf].dtype.name for leaf in small} == {
        **{leaf + ".int8": "int8" for leaf in LEAVES},
        **{leaf + ".scales": "float32" for leaf in LEAVES},
        **{"0.conv": "float32", "tail": "float32"},
    }
    assert small["0.recurrent.scales"].shape == (H, K) and small["0.recurrent.int8"].shape == (H, K, V)
    shelf = site.holder.store.shelves[Tier.HOST]
    assert shelf.nbytes == nbytes(small) + sum(map(nbytes, site.pages))
    assert nbytes(small) < 0.3 * nbytes(state())
    loaded, exact = site.load(Tier.HOST), state()
    assert isinstance(loaded.state, dict) and loaded.state.keys() == exact.keys()
    for leaf in exact:
        if leaf in LEAVES:
            assert np.abs(loaded.state[leaf] - exact[leaf]).max() <= small[leaf + ".scales"].max() * 0.501
        else:
            assert np.array_equal(loaded.state[leaf], exact[leaf])
    assert all(same(page, mine) for page, mine in zip(loaded.pages, site.pages, strict=True))


def test_it_is_quantised_once_on_whatever_ways_it_goes(tmp_path: Path) -> None:
    """Down twice, up, down again, and through a restart: the same bytes, and two leaves compressed in all."""
    site = Site()
    assert demote(site.holder, site.key, Tier.DEVICE, site.storages, 1.0)
    small = dict(site.held(Tier.HOST))
    assert demote(site.holder, site.key, Tier.HOST, site.storages, 2.0)
    assert same(site.held(Tier.DISK), small)
    assert promote(site.holder, site.key, Tier.DEVICE, site.storages, 3.0)
    assert same(site.held(Tier.DEVICE), small)
    site.holder.update(lambda s: s.drop(site.key, Tier.DISK, 4.0))
    assert demote(site.holder, site.key, Tier.DEVICE, site.storages, 5.0)
    assert same(site.held(Tier.HOST), small)
    save(site.holder.store, tmp_path, site.storages, 6.0)
    site.holder = Holder(restore(tmp_path, site.empty(), site.storages, 6.0))
    assert same(site.held(Tier.HOST), small)
    assert site.counting.compressed == len(LEAVES) and site.counting.expanded == 0


def test_each_request_expands_once_and_has_arrays_of_its_own() -> None:
    site = Site()
    assert demote(site.holder, site.key, Tier.DEVICE, site.storages, 1.0)
    first, second = site.load(Tier.HOST).state, site.load(Tier.HOST).state
    assert site.counting.expanded == 2 * len(LEAVES)
    assert isinstance(first, dict) and isinstance(second, dict) and same(first, second)
    before = {leaf: array.copy() for leaf, array in site.held(Tier.HOST).items()}
    for leaf in LEAVES:
        first[leaf] *= 0
    assert same(site.load(Tier.HOST).state, second) and same(site.held(Tier.HOST), before)


def test_the_fast_copy_stays_exact_while_the_slow_one_is_small() -> None:
    site = Site()
    assert promote(site.holder, site.key, Tier.DISK, site.storages, 1.0)
    assert same(site.load(Tier.DEVICE).state, state())
    assert site.counting.expanded == 0
    assert not same(site.load(Tier.DISK).state, state())


def test_states_that_differ_by_rounding_are_no_conflict_where_that_is_declared() -> None:
    site = Site()
    before = site.holder.store
    put = dict(kind=Kind.MARK, now=1.0)
    with pytest.raises(Conflict):
        before.put(NAMESPACE, TOKENS, state(1), site.pages, **put)  # type: ignore[arg-type]
    assert before.put(NAMESPACE, TOKENS, state(1), site.pages, exact=False, **put) is before  # type: ignore[arg-type]


def test_the_kernels_functions_are_such_functions() -> None:
    compression = Compression(
        leaves=LEAVES,
        compress=lambda leaf: compress_state(jnp.asarray(leaf)),
        expand=lambda values, scales: decompress_state(CompressedState(values, scales)),
    )
    small = compression.compressed(state())
    again = compression.expanded(small)
    assert isinstance(small, dict) and isinstance(again, dict) and compression.compressed(small) == small
    for leaf in LEAVES:
        bound = np.asarray(small[leaf + ".scales"])[..., None] * 0.5
        assert (np.abs(np.asarray(again[leaf]) - state()[leaf]) <= bound).all()


def test_namespaces_tell_compressed_states_from_exact_ones() -> None:
    exact = Namespace(weights=b"w", tokenizer=b"t").digest()
    store = Site().holder.store
    assert store.match(NAMESPACE, TOKENS).boundaries and not store.match(exact, TOKENS).boundaries


@pytest.mark.parametrize(
    ("payload", "message"),
    [({"0.recurrent": np.ones((1, 1, 1))}, "without a leaf '2.recurrent'"), (Sized(3), "only named arrays")],
    ids=["leaf-missing", "no-arrays"],
)
def test_what_cannot_be_compressed_is_refused(payload: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Site().compression.compressed(payload)
