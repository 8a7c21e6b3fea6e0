"""Situations in which hybrid prefix caches have lost a boundary or served a wrong one, by their token counts."""

from __future__ import annotations

import numpy as np
import pytest

from cache.namespace import Namespace
from cache.payload import Sized
from cache.placement import place
from cache.plan import Limits, plan, resume
from cache.retention.protocol import Creation, Kind
from cache.tier import Tier
from cache.tokens import Media
from cache.view import Rows, Seen, View
from cache_site import NAMESPACE, ROW, STATE, Site, join, text

REMOTE = Tier.REMOTE.bit


def boundaries(made: tuple[tuple[int, Kind], ...]) -> list[int]:
    return [boundary for boundary, _ in made]


def remote(rows: int, *states: int) -> View:
    """A remote store with latents up to a row, and these checkpoints."""
    return View(max([rows, *states]), (Rows(0, rows, REMOTE),), tuple(Seen(each, REMOTE) for each in states))


# what two requests share is filled once


@pytest.mark.parametrize("shared", [1024, 1000, 64, 4000], ids=lambda shared: f"{shared}-shared")
def test_a_branch_point_is_filled_once_and_the_sibling_hits(shared: int) -> None:
    site, trunk = Site(), text(4096)
    site.serve(trunk)
    floor = shared // 64 * 64
    resumed, made = site.serve(join(trunk[:shared], text(1024, 1)))
    assert (resumed, made[0]) == (0, (floor, Kind.BRANCH))
    assert set(boundaries(made)) == {floor, *((shared + 1024 - ends) // 64 * 64 for ends in (0, 1))}
    resumed, made = site.serve(join(trunk[:shared], text(1024, 2)))
    assert resumed == floor
    assert floor not in boundaries(made)
    assert sum(seen.boundary == floor for seen in site.store.match(NAMESPACE, trunk).boundaries) == 1


def test_latents_that_only_a_remote_store_has_name_the_missing_boundary() -> None:
    """The first instance fills it once; another, which knows nothing of the prompt, hits."""
    trunk = text(4096)
    a, b = join(trunk[:1024], text(1024, 1)), join(trunk[:1024], text(1024, 2))
    first, second = Site(), Site()
    found = first.plan(a, remote=remote(1024))
    assert (found.boundary, found.latent_hit, found.state_hit) == (0, 1024, 0)
    assert boundaries(found.missing) == [1024]
    assert 1024 in boundaries(first.serve(a, remote=remote(1024))[1])
    assert second.plan(b, remote=remote(1024, 1024)).boundary == 1024
    assert second.plan(b, remote=remote(1024, 1024)).missing == ()


@pytest.mark.parametrize("grid", [64, 128, 512, 1])
@pytest.mark.parametrize(("first", "shared"), [(20_000, 15_000), (910_000, 905_000)])
def test_at_most_a_grid_step_is_computed_twice(first: int, shared: int, grid: int) -> None:
    site, trunk = Site(grid=grid, page=512), text(first)
    site.serve(trunk)
    site.serve(join(trunk[:shared], text(first - shared, 1)))
    resumed, _ = site.serve(join(trunk[:shared], text(first - shared, 2)))
    assert shared - grid < resumed <= shared
    resumed, _ = site.serve(join(trunk, text(5000, 3)))
    assert first - grid < resumed <= first


@pytest.mark.parametrize(("suffix", "second"), [(40, 6464), (376, 0), (1296, 0)])
def test_a_long_suffix_behind_a_shared_prefix_hits_from_the_third_request(suffix: int, second: int) -> None:
    """The second pays once, unless the first prompt's own end lies in the prefix, as with 40."""
    site, prefix = Site(), text(6476)
    hits = [site.serve(join(prefix, text(suffix, seed)))[0] for seed in range(1, 5)]
    assert hits == [0, second, 6464, 6464]


def test_an_edit_before_the_only_boundary_costs_once() -> None:
    site, prompt = Site(), text(20_000)
    site.serve(prompt)
    edits = [site.serve(join(prompt[:12_000], text(8000, seed)))[0] for seed in (1, 2, 3)]
    assert edits == [0, 11_968, 11_968]


def test_short_turns_keep_their_ends() -> None:
    site, prompt, hits = Site(), text(300), []
    for seed, turn in enumerate([300, 900, 6241, 12]):
        hits.append(site.serve(prompt)[0])
        prompt = join(prompt, text(turn, seed + 1))
    assert hits == [0, 256, 576, 1472]


# the last token is computed, always


@pytest.mark.parametrize(
    ("cached", "prompt", "hit"),
    [(8, 8, 0), (8, 9, 8), (3072, 3072, 3008), (3072, 3073, 3072), (3071, 3072, 3008), (3072, 3071, 3008)],
    ids=["all of 8", "8 of 9", "all of 3072", "3072 of 3073", "3071 of 3072", "3072 for 3071"],
)
def test_an_exact_multiple_falls_back_to_the_boundary_before(cached: int, prompt: int, hit: int) -> None:
    site, tokens = Site(grid=64 if cached > 64 else 8), text(4096)
    site.serve(tokens[:cached])
    assert site.serve(tokens[:prompt])[0] == hit


def test_with_large_blocks_the_boundary_before_is_a_block_away() -> None:
    """1,536 tokens a block."""
    tokens = text(3073)
    for first, second, least in [(3072, 3072, 1536), (3072, 3073, 3072), (3071, 3072, 1536)]:
        site = Site(grid=1536, page=1536)
        site.serve(tokens[:first])
        assert site.serve(tokens[:second])[0] == least


# a hit is an intersection


def test_the_smaller_of_two_lengths_is_no_boundary() -> None:
    both = (Seen(32, 1, b"32"), Seen(48, 1, b"48"), Seen(100, 1, b"100"))
    seen = View(100, (Rows(0, 32, 1), Rows(48, 64, 1)), both)
    assert resume(seen, 200, 16, Limits(grid=16)).boundary == 32
    seen = View(100, (Rows(0, 64, 1),), both)
    assert resume(seen, 200, 16, Limits(grid=16)).boundary == 48


@pytest.mark.parametrize(
    ("latents", "states", "tokens", "hit"),
    [(1024, [], 2000, 0), (7500, [4096, 8192], 9000, 4096), (6976, [4096], 8000, 4096), (0, [1024], 2000, 0)],
    ids=["latents alone", "7500 and 8192", "latents further", "state alone"],
)
def test_both_groups_hit_or_none(latents: int, states: list[int], tokens: int, hit: int) -> None:
    plan = resume(remote(latents // 4 * 4, *states), tokens, 4, Limits())
    assert plan.boundary == hit
    assert plan.latent_hit == latents
    assert plan.state_hit == max([state for state in states if state < tokens], default=0)


def test_the_views_of_two_tiers_are_one_set() -> None:
    """Neither the local nor the remote store alone has a boundary whole; together they have one."""
    site, tokens = Site(budgets={Tier.HOST: 10**9}), text(2048)
    site.put(tokens[:512], tier=Tier.HOST)
    there = View(1024, (Rows(512, 1024, REMOTE),), (Seen(1024, REMOTE),))
    plan = site.plan(tokens, remote=there)
    assert site.plan(tokens).boundary == 512
    assert (plan.boundary, plan.state) == (1024, Tier.REMOTE)
    assert plan.rows == ((0, 512, Tier.HOST), (512, 1024, Tier.REMOTE))


def test_a_tier_that_may_not_be_used_is_not_seen() -> None:
    site, tokens = Site(budgets={Tier.DEVICE: 10**9, Tier.HOST: 10**9}), text(2048)
    site.put(tokens[:512])
    site.put(tokens[:1024], tier=Tier.HOST)
    index = site.store.prompts.indexes[NAMESPACE]
    for tiers, found in [(3, (1024, 1024)), (1, (512, 512)), (2, (1024, 1024)), (4, (0, 0))]:
        planned = plan(tokens, index, Limits(tiers=tiers))
        assert (planned.boundary, planned.latent_hit) == found
    assert plan(tokens, index, Limits()).rows == ((0, 512, Tier.DEVICE), (512, 1024, Tier.HOST))
    assert plan(tokens, index, Limits(tiers=2)).rows == ((0, 1024, Tier.HOST),)
    assert plan(tokens, index, Limits(), remote(2000 // 64 * 64, 1984)).boundary == 1984


@pytest.mark.parametrize(
    ("limits", "message"),
    [({"grid": 0}, "grid=0"), ({"most": -1}, "most=-1"), ({"nbytes": -1}, "nbytes=-1")],
    ids=["grid", "most", "nbytes"],
)
def test_limits_check_themselves(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**limits)
    with pytest.raises(ValueError, match="interval=-1"):
        Creation(interval=-1)


def test_a_generation_s_end_resumes_on_another_instance() -> None:
    """2,000 tokens of prompt, 1,000 generated; the checkpoint lies off the grid, where generation stopped."""
    site, tokens = Site(), text(3050)
    key = site.put(tokens[:3000], kind=Kind.GENERATION_END)
    assert site.plan(tokens).boundary == 3000
    elsewhere = Site().plan(tokens, remote=remote(2944, 3000))
    assert (elsewhere.boundary, elsewhere.rows) == (3000, ((0, 2944, Tier.REMOTE),))
    assert key == site.store.match(NAMESPACE, tokens).boundaries[-1].key


# a key is its contents


def test_a_state_is_found_at_its_own_length_only() -> None:
    """A chunk ended at 364 and the next crossed 1,600: what lies at 364 is no answer for 1,600."""
    site, tokens = Site(grid=4, page=4), text(2000)
    site.put(tokens[:364])
    assert site.plan(tokens[:1604]).boundary == 364
    assert site.plan(tokens[:364]).boundary == 0


def test_an_aborted_prefill_leaves_what_it_had_committed() -> None:
    """60k tokens, boundaries each 8k, aborted in the third chunk."""
    site, tokens = Site(), text(60_000)
    every = Creation(interval=8192)
    site.serve(tokens, creation=every, reach=2 * 8192)
    assert site.plan(tokens).boundary == 16_384
    before = site.store
    site.serve(tokens, creation=every, reach=0)
    assert site.store.stats().tiers == before.stats().tiers


def test_two_requests_of_one_step_do_not_hit_each_other() -> None:
    site, tokens = Site(), text(5000)
    first, second = site.plan(tokens), site.plan(tokens)
    assert first.boundary == second.boundary == 0
    key = site.put(tokens[:4992])
    store = site.store
    assert site.put(tokens[:4992]) == key
    assert site.store is store


def test_an_adapter_is_no_salt() -> None:
    names = [
        Namespace(weights=b"w", tokenizer=b"t", adapter=b"X").digest(),
        Namespace(weights=b"w", tokenizer=b"t", salt=b"X").digest(),
        Namespace(weights=b"w", tokenizer=b"t").digest(),
        Namespace(weights=b"w", tokenizer=b"t", state_dtype="int8").digest(),
        Namespace(weights=b"w", tokenizer=b"t", topology="tp=2").digest(),
    ]
    site, tokens = Site(), text(2048)
    site.serve(tokens, namespace=names[0])
    assert [site.plan(join(tokens, tokens), namespace=name).boundary for name in names] == [2048, 0, 0, 0, 0]


def test_two_images_behind_the_same_text_differ() -> None:
    site, tokens = Site(), text(4096)
    placed = {name: [Media(1000, name)] for name in (b"image one", b"image two")}
    site.serve(tokens, media=placed[b"image one"])
    longer = join(tokens, tokens)
    assert site.plan(longer, media=placed[b"image one"]).boundary == 4096
    assert site.plan(longer, media=placed[b"image two"]).boundary == 0
    assert site.plan(longer).boundary == 0
    assert site.plan(longer, media=[Media(1500, b"image one")]).boundary == 0
    assert site.serve(longer, media=placed[b"image two"])[1][0] == (960, Kind.BRANCH)
    assert site.plan(longer, media=[Media(1000, b"image three")]).boundary == 960


# pins, budgets, refusals


def test_a_request_that_is_refused_after_its_match_leaves_nothing() -> None:
    site, tokens = Site(), text(4096)
    site.serve(tokens)
    before = site.store.stats()
    for _ in range(1000):
        plan = site.plan(join(tokens, tokens))
        assert plan.key is not None
        site.store = site.store.pin(plan.key).unpin(plan.key)
    assert site.store.stats() == before


def test_what_is_in_use_survives_an_eviction_of_everything() -> None:
    site, tokens = Site(), text(8192)
    key = site.put(tokens)
    site.put(text(4096, 1))
    site.store = site.store.pin(key).evict(Tier.DEVICE, 10**9, 9.0)
    assert site.plan(join(tokens, tokens)).boundary == 8192
    assert site.store.stats().tiers[Tier.DEVICE].checkpoints == 1
    site.store = site.store.unpin(key).evict(Tier.DEVICE, 10**9, 9.0)
    assert site.store.stats().tiers[Tier.DEVICE].nbytes == 0


@pytest.mark.parametrize("room", [0, STATE, STATE + 64], ids=["nothing", "a state", "a page too few"])
def test_a_checkpoint_without_room_is_skipped_and_nothing_fails(room: int) -> None:
    """All that there is is pinned."""
    size = STATE + 8192 * ROW
    site = Site(budgets={Tier.DEVICE: size + room})
    tokens = text(8192)
    key = site.put(tokens)
    site.store = site.store.pin(key)
    longer = site.put(join(tokens, text(128, 1)))
    assert site.store.counts.skipped == 1
    assert longer not in site.store.shelves[Tier.DEVICE].states
    assert site.plan(join(tokens, text(256, 1))).boundary == 8192


def test_a_hit_is_not_evicted_by_the_checkpoint_that_comes_from_it() -> None:
    """Room for the hit and one page more."""
    site = Site(budgets={Tier.DEVICE: 2 * STATE + 8192 + 64}, share=1.0)
    tokens = text(8192)
    key = site.put(tokens)
    site.put(text(64, 5))
    site.store = site.store.pin(key)
    site.put(join(tokens, text(64, 1)))
    assert site.plan(join(tokens, text(64, 1), text(64, 2))).boundary == 8256


def test_suffixes_come_and_go_and_the_prefix_stays_in_the_host() -> None:
    """4k tokens and nine suffixes; the device is emptied; the prefix is found in the host."""
    site = Site(budgets={Tier.DEVICE: 10**9, Tier.HOST: 10**9})
    prefix = text(4096)
    key = site.put(prefix)
    for seed in range(1, 10):
        site.put(join(prefix, text(640, seed)))
    lacks = site.store.prompts.lacks(key, Tier.HOST)
    site.store = site.store.copied(key, Tier.HOST, Sized(STATE), dict.fromkeys(lacks, Sized(64)), 1.0)
    site.store = site.store.evict(Tier.DEVICE, 10**9, 2.0)
    plan = site.plan(join(prefix, text(640, 3)))
    assert (plan.boundary, plan.state, plan.rows) == (4096, Tier.HOST, ((0, 4096, Tier.HOST),))


# where a prefill makes checkpoints


def test_marks_intervals_and_allowances() -> None:
    site, tokens = Site(), text(10_000)
    plan = site.plan(tokens)
    creation = Creation(interval=4096)
    everything = place(plan, 10_000, Limits(), creation, marks=[700, 3000])
    assert everything == (
        (640, Kind.MARK),
        (2944, Kind.MARK),
        (4096, Kind.INTERVAL),
        (8192, Kind.INTERVAL),
        (9984, Kind.PROMPT_END),
    )
    for most, kept in [(0, []), (1, [9984]), (2, [2944, 9984]), (4, [640, 2944, 8192, 9984])]:
        assert boundaries(place(plan, 10_000, Limits(most=most), creation, marks=[700, 3000])) == kept
    limits = Limits(nbytes=3 * STATE + 1, state_nbytes=STATE, most=5)
    assert boundaries(place(plan, 10_000, limits, creation, marks=[700, 3000])) == [640, 2944, 9984]
    only = Creation(kinds=frozenset({Kind.MARK}))
    assert boundaries(place(plan, 10_000, Limits(), only, marks=[700, 3000])) == [640, 2944]


@pytest.mark.parametrize("grid", [1, 64, 512, 1536])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 1535, 1536, 8192, 30_001])
def test_what_is_placed_can_be_put_and_is_hit(grid: int, num_tokens: int) -> None:
    """Where a prefill may stop and what may be published is one set."""
    site, tokens = Site(grid=grid), text(num_tokens)
    _, made = site.serve(tokens, creation=Creation(interval=1000), marks=[num_tokens // 3])
    assert all(boundary % grid == 0 and 0 < boundary <= num_tokens for boundary, _ in made)
    for boundary, _ in made:
        assert (
            site.plan(tokens[: boundary + 1] if boundary < num_tokens else join(tokens, tokens)).boundary
            >= boundary
        )
    assert site.serve(tokens)[0] == (num_tokens - 1) // grid * grid


def test_a_remembered_boundary_is_made_when_a_prefill_passes_it() -> None:
    site, tokens = Site(), text(8000)
    site.store = site.store.remember(NAMESPACE, tokens[:4032], kind=Kind.PROMPT_END, now=0.0)
    assert site.plan(tokens[:4000]).boundary == 0
    resumed, made = site.serve(tokens)
    assert resumed == 0
    assert made == ((4032, Kind.MISSING), (7936, Kind.PROMPT_END), (8000, Kind.PROMPT_END))
    assert site.plan(tokens[:5000]).boundary == 4032


def test_forgotten_boundaries_take_their_tokens_with_them() -> None:
    site = Site()
    for seed in range(20):
        site.now = float(seed)
        site.store = site.store.remember(NAMESPACE, text(500, seed), kind=Kind.PROMPT_END, now=site.now)
    held = site.put(text(640, 30))
    site.store = site.store.forget(5)
    assert site.store.stats().remembered == 6
    assert held in site.store.prompts.places
    index = site.store.prompts.indexes[NAMESPACE]
    assert [index.match(text(500, seed)).length for seed in range(20)] == [0] * 15 + [500] * 5


def test_turning_the_remote_view_on_never_lowers_a_hit() -> None:
    rng = np.random.default_rng(7)
    site, trunk = Site(grid=16, page=16), text(2000)
    for seed, cut in enumerate(rng.integers(1, 2000, 12)):
        site.serve(join(trunk[:cut], text(200, seed + 1)))
    for cut in rng.integers(1, 2000, 200):
        prompt = join(trunk[:cut], text(100, 99))
        rows = int(rng.integers(0, 2000)) // 16 * 16
        there = remote(rows, *sorted({int(each) for each in rng.integers(1, 2000, 3)}))
        assert site.plan(prompt, remote=there).boundary >= site.plan(prompt).boundary
