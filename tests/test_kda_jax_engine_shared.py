"""Checkpoints that another process resumes from, and a tier of the cache in a store of objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_kda_jax_engine import state_of

from cache import Broken, Holder, InMemory, KeyChain, Limits, Namespace, Store, Tier, demote, load
from cache.retention import policy
from cache.retention.protocol import Kind
from kda_jax.engine import ObjectStorage, Shared, cut, join
from kda_jax.state import KDAState, MLAState, ModelState
from same_state import assert_same_state
from transfer import DiskObjects, MemoryObjects, Miss, Objects

NAMESPACE = Namespace(weights=b"weights", tokenizer=b"bytes").digest()
OTHER = Namespace(weights=b"other weights", tokenizer=b"bytes").digest()
PAGE = 8
TOKENS = np.arange(1, 101, dtype=np.int32)


@pytest.fixture(params=["memory", "disk"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Objects]:
    with (
        MemoryObjects() if request.param == "memory" else DiskObjects(tmp_path / "objects", 1 << 26) as opened
    ):
        yield opened


def shared(objects: Objects, namespace: bytes = NAMESPACE, *, int8: bool = False) -> Shared:
    return Shared(objects, namespace, page=PAGE, int8=int8)


def states(*boundaries: int) -> dict[int, ModelState]:
    """States at boundaries of one prompt: their latents have the same rows, as a prefill's have."""
    deepest = state_of(100, capacity=100)
    made = {}
    for at in boundaries:
        layers = [
            own._replace(latent=rows.latent)
            if isinstance(own, MLAState) and isinstance(rows, MLAState)
            else own
            for own, rows in zip(state_of(at, capacity=100).layers, deepest.layers)
        ]
        made[at] = ModelState(tuple(layers))
    return made


@pytest.mark.parametrize("boundaries", [(1,), (7,), (8,), (9, 64, 65, 99)], ids=str)
def test_another_process_resumes_at_the_deepest_boundary(
    objects: Objects, boundaries: tuple[int, ...]
) -> None:
    made = states(*boundaries)
    assert shared(objects).publish(TOKENS, made) == list(boundaries)
    for length in (*(at + 1 for at in boundaries), 100):
        deepest = max(at for at in boundaries if at < length)
        resumed = shared(objects).resume(TOKENS[:length])
        assert resumed.boundary == deepest and resumed.state is not None
        assert_same_state(made[deepest], resumed.state)


def test_a_prompt_that_parts_earlier_resumes_before_it_parts(objects: Objects) -> None:
    shared(objects).publish(TOKENS, states(32, 64))
    other = TOKENS.copy()
    other[40:] += 1000
    assert shared(objects).resume(other).boundary == 32
    other[31] += 1000
    assert shared(objects).resume(other) == (0, None, shared(objects).resume(other).found)


def test_a_whole_hit_leaves_the_last_token_to_compute(objects: Objects) -> None:
    shared(objects).publish(TOKENS, states(32, 64))
    assert shared(objects).resume(TOKENS[:64]).boundary == 32
    assert shared(objects).resume(TOKENS[:32]).boundary == 0


def test_a_boundary_that_was_filled_later_is_found(objects: Objects) -> None:
    shared(objects).publish(TOKENS, states(64))
    missing = shared(objects).resume(TOKENS[:50])
    assert missing.boundary == 0
    shared(objects).publish(TOKENS[:40], states(40), known=missing.found.known)
    assert shared(objects).resume(TOKENS[:50]).boundary == 40


def test_pages_that_are_there_are_not_written_again(objects: Objects) -> None:
    first = shared(objects)
    first.publish(TOKENS, states(32))
    before = objects.counters().operations["put", "stored"].objects
    shared(objects).publish(TOKENS, states(48), resumed=32)
    pages, state = 2, 1  # the marks of 32 are those of 48
    assert objects.counters().operations["put", "stored"].objects - before == 2 * (pages + state)


@pytest.mark.parametrize("lost", ["page", "state"])
def test_what_lost_a_part_resumes_at_the_boundary_before(objects: Objects, lost: str) -> None:
    shared(objects).publish(TOKENS, states(24, 64))
    chain = KeyChain.start(NAMESPACE, PAGE).extend(TOKENS[:64])
    name = f"page/{chain.added[5].hex()}" if lost == "page" else f"state/{chain.key.hex()}"
    assert objects.remove([name], 5.0) == [True]
    assert shared(objects).resume(TOKENS).boundary == 24
    chain = KeyChain.start(NAMESPACE, PAGE).extend(TOKENS[:24])
    assert objects.remove([f"page/{chain.added[0].hex()}"], 5.0) == [True]
    assert shared(objects).resume(TOKENS).boundary == 0


def test_who_passes_a_boundary_brings_its_marks_back(objects: Objects) -> None:
    shared(objects).publish(TOKENS, states(30))
    start = KeyChain.start(NAMESPACE, PAGE).key.hex()
    marks = [f"mark/4096/state/{start}", f"mark/64/state/{start}"]
    assert objects.contains(marks, 5.0) == [True, True]
    assert objects.remove(marks, 5.0) == [True, True]
    assert shared(objects).resume(TOKENS[:50]).boundary == 0
    shared(objects).publish(TOKENS, states(99), resumed=30)
    assert shared(objects).resume(TOKENS[:50]).boundary == 30


def test_boundaries_of_one_prompt_write_a_page_once(objects: Objects) -> None:
    shared(objects).publish(TOKENS, states(32, 48, 99))
    assert ("put", "held") not in objects.counters().operations


@pytest.mark.parametrize("lacking", ["nothing", "layers.0.conv"])
def test_a_state_that_does_not_belong_there_is_not_resumed_from(objects: Objects, lacking: str) -> None:
    shared(objects).publish(TOKENS, states(24, 40))
    keys = [KeyChain.start(NAMESPACE, PAGE).extend(TOKENS[:at]).key.hex() for at in (24, 40)]
    assert objects.remove([f"state/{keys[1]}"], 5.0) == [True]
    storage = ObjectStorage(objects, NAMESPACE, 5.0)
    wrong = storage.read(f"state/{keys[0]}")
    wrong.pop(lacking, None)
    storage.write(f"state/{keys[1]}", wrong)
    assert shared(objects).resume(TOKENS).boundary == 24


def test_namespaces_share_nothing(objects: Objects) -> None:
    shared(objects).publish(TOKENS, states(64))
    assert shared(objects, OTHER).resume(TOKENS).boundary == 0


def test_other_bytes_under_one_name_are_refused_and_the_first_stay(objects: Objects) -> None:
    first = states(16)
    layer, *others = first[16].layers
    assert isinstance(layer, KDAState)
    second = {16: ModelState((layer._replace(conv=layer.conv + 1), *others))}
    assert shared(objects).publish(TOKENS, first) == [16]
    assert shared(objects).publish(TOKENS, first) == [16]
    assert shared(objects).publish(TOKENS, second) == []
    resumed = shared(objects).resume(TOKENS)
    assert resumed.state is not None
    assert_same_state(first[16], resumed.state)


def test_int8_resumes_from_what_was_kept(objects: Objects) -> None:
    made = states(40)
    assert shared(objects, int8=True).publish(TOKENS, made) == [40]
    resumed = shared(objects, int8=True).resume(TOKENS)
    assert resumed.state is not None
    assert_same_state(join(*cut(made[40], PAGE, int8=True)), resumed.state)


def test_a_full_store_costs_the_checkpoint_and_nothing_else() -> None:
    with MemoryObjects(20_000) as objects:
        first = shared(objects).publish(TOKENS, states(8))
        assert first == [8]
    with MemoryObjects(500) as objects:
        assert shared(objects).publish(TOKENS, states(64)) == []
        assert shared(objects).resume(TOKENS).boundary == 0


def test_a_prompt_has_a_token(objects: Objects) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        shared(objects).resume([])


# a tier of the cache


class Tiered:
    """A store with one checkpoint of 20 tokens on the device, and a tier of objects below it."""

    def __init__(self, objects: Objects, tier: Tier, namespace: bytes = NAMESPACE) -> None:
        self.below, self.objects = tier, ObjectStorage(objects, namespace, 10.0)
        self.storages = {Tier.DEVICE: InMemory(), tier: self.objects}
        store = Store.empty(
            {Tier.DEVICE: 1 << 20, tier: 1 << 20}, policy("ours"), state_nbytes=64, row_nbytes=8, page=PAGE
        )
        self.state = state_of(20, capacity=40)
        leaves, pages = cut(self.state, PAGE)
        store = store.put(NAMESPACE, TOKENS[:20], leaves, pages, kind=Kind.PROMPT_END, now=0.0)
        self.key = KeyChain.start(NAMESPACE, PAGE).extend(TOKENS[:20]).key
        self.holder = Holder(store)

    def load(self) -> tuple[Tier | None, ModelState]:
        plan = self.holder.store.plan(self.holder.store.match(NAMESPACE, TOKENS), len(TOKENS), Limits(grid=1))
        assert plan.boundary == 20
        chain = KeyChain.start(NAMESPACE, PAGE).extend(TOKENS[:20])
        return plan.state, join(*load(self.holder.store, plan, chain, self.storages))


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.REMOTE])
def test_what_was_demoted_to_objects_comes_back_bit_by_bit(objects: Objects, tier: Tier) -> None:
    site = Tiered(objects, tier)
    assert demote(site.holder, site.key, Tier.DEVICE, site.storages, 1.0)
    where, state = site.load()
    assert where is tier
    assert_same_state(site.state, state)


def test_objects_that_were_lost_are_a_miss(objects: Objects) -> None:
    site = Tiered(objects, Tier.DISK)
    assert demote(site.holder, site.key, Tier.DEVICE, site.storages, 1.0)
    assert objects.remove([f"state/{site.key.hex()}"], 5.0) == [True]
    with pytest.raises(Broken):
        site.load()
    assert site.objects.counters().operations["fetch", Miss.ABSENT.value].objects == 1


def test_a_tier_that_cannot_write_leaves_the_checkpoint_nowhere_but_here() -> None:
    with MemoryObjects(100) as objects:
        site = Tiered(objects, Tier.DISK)
        assert not demote(site.holder, site.key, Tier.DEVICE, site.storages, 1.0)
        assert site.holder.store.stats().tiers[Tier.DISK].checkpoints == 0


def test_only_named_arrays_are_stored(objects: Objects) -> None:
    storage = ObjectStorage(objects, NAMESPACE, 1.0)
    with pytest.raises(ValueError, match="only named arrays"):
        storage.write("state/00", np.zeros(3))
