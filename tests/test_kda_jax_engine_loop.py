"""Many requests at once on a real model: their tokens are those of each alone, whatever happens around them."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engine_script import next_prompt
from engine_site import CONFIG, NAMESPACE, SIZES, assert_cold, cold, conserved, engine
from engine_storm import storm

from cache import Store, Tier
from cache.retention import Creation, Kind
from cache.tiers import page_name, state_name
from kda_jax.engine import Closed, Engine, Outcome, Overloaded, Refused, Token
from kda_jax.engine.explain import Explanation, Limit, TreeNode, tree
from kda_jax.engine.lookup import Lookup
from kda_jax.sampling import make_sampler


def random_prompts(seed: int, count: int) -> list[list[int]]:
    """Conversations that branch: most prompts go on from a piece of one before."""
    choose, prompts = random.Random(seed), []
    for _ in range(count):
        prompts.append(next_prompt(choose, prompts))
    return prompts


@pytest.fixture
def one() -> Iterator[Engine]:
    with engine() as made:
        yield made
    conserved(made)


def test_concurrent_conversations_make_the_tokens_they_make_alone(one: Engine) -> None:
    """Branches, repeats, exact multiples; cancels at random; second turns that go on from answers."""
    choose, differing = random.Random(1), 0
    prompts = random_prompts(0, 40)
    streams = [(prompt, one.submit(prompt, max_new_tokens=choose.randint(1, 12))) for prompt in prompts]
    for at, (_, stream) in enumerate(streams):
        if at % 5 == 4:
            threading.Timer(choose.random() * 0.2, stream.cancel).start()
    turns = []
    for prompt, stream in streams:
        finished = stream.result(60.0)
        differing += assert_cold(prompt, finished.tokens, 12)
        assert finished.outcome in (Outcome.FINISHED, Outcome.CANCELLED)
        if len(turns) < 20:
            turns.append([*prompt, *finished.tokens, choose.randrange(CONFIG.vocab_size)])
    for prompt, finished in zip(turns, one.generate(turns, max_new_tokens=8)):
        differing += assert_cold(prompt, finished.tokens, 8)
        assert len(finished.tokens) == 8 and finished.reason == "length"
    assert differing <= 1
    again = one.generate(turns, max_new_tokens=1)
    assert sum(finished.usage.cached.get("device", 0) for finished in again) > 1000


@pytest.mark.parametrize("faults", [False, True], ids=["fair", "foul"])
def test_a_storm_leaves_no_page_behind(faults: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_jax.engine.copying.PIECES", 1)  # so that checkpoints wait to be copied
    happened = storm(200, 5, faults=faults, lookup=0 if faults else 3, pages=80)
    assert happened["finished"] > 30 and happened["cancelled"] > 2 and happened["restored"] > 2000
    assert happened["from device"] and happened["from host"] + happened["from remote"]
    assert bool(happened["failed"]) == faults and happened["within rounding"] <= 1


def test_a_conversation_resumes_at_the_end_of_the_last_generation(one: Engine) -> None:
    prompt = random_prompts(2, 1)[0]
    first = one.generate([prompt], max_new_tokens=9)[0]
    second = one.generate([[*prompt, *first.tokens, 5]], max_new_tokens=3)[0]
    assert second.usage.cached == {"device": len(prompt) + 8}  # the last token was never taken in
    assert second.usage.prompt_tokens == len(prompt) + 10


def test_a_stop_token_ends_a_request_and_is_not_told(one: Engine) -> None:
    prompt = [1, 2, 3]
    tokens = cold(prompt, 6).tokens
    stop = next(token for at, token in enumerate(tokens) if at and token not in tokens[:at])
    at = tokens.index(stop)
    finished = one.generate([prompt], max_new_tokens=6, stop_tokens=[stop])[0]
    assert finished.tokens == tuple(tokens[:at]) and finished.reason == "stop"
    assert finished.usage.completion_tokens == at + 1
    assert one.generate([prompt], max_new_tokens=at, stop_tokens=[stop])[0].reason == "length"


def test_logprobs_are_those_of_the_logits(one: Engine) -> None:
    alone = cold([7, 8, 9], 3)
    plain, told = one.submit([7, 8, 9], max_new_tokens=3), one.submit([7, 8, 9], max_new_tokens=3, logprobs=4)
    assert [token.logprob for token in plain] == [None] * 3
    for token, logits in zip(told, alone.logits, strict=True):
        logprobs = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
        assert token.logprob == pytest.approx(logprobs[token.token], abs=1e-4)
        assert [each for each, _ in token.top] == np.argsort(-logprobs)[:4].tolist()


def test_guesses_change_no_token() -> None:
    """A text that repeats itself, greedily and not, with its logarithms and up to a stop token."""
    prompt, warm = [5, 6, 7, 8] * 20, make_sampler(temperature=0.7)
    stops = [cold(prompt, 30).tokens[-1]]
    ways: list[dict[str, Any]] = [{}, {"sampler": warm, "seed": 3}, {"logprobs": 2}, {"stop_tokens": stops}]
    with engine(lookup=3) as guessing, engine() as plain:
        for options in ways:
            told = [list(each.submit(prompt, max_new_tokens=40, **options)) for each in (guessing, plain)]
            assert [token.token for token in told[0]] == [token.token for token in told[1]]
            for mine, theirs in zip(*told):
                assert (mine.logprob is None) == ("logprobs" not in options)
                if mine.logprob is not None:
                    assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4) and len(mine.top) == 2
        usage = guessing.generate([prompt], max_new_tokens=40)[0].usage
        numbers = guessing.statistics()
    assert usage.completion_tokens == 40 and usage.drafted >= usage.accepted > 0
    assert numbers.drafted_tokens >= usage.drafted and numbers.generated_tokens > 100
    conserved(guessing)


def test_a_prompt_is_read_for_guesses_where_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine's thread and by no caller's, who may serve others."""
    threads, read = Counter[str](), Lookup.read

    def noted(lookup: Lookup, tokens: np.ndarray, most: int) -> None:
        before = lookup.count
        read(lookup, tokens, most)
        threads[threading.current_thread().name] += lookup.count - before

    monkeypatch.setattr(Lookup, "read", noted)
    with engine(lookup=3) as guessing:
        assert guessing.generate([[5, 6, 7, 8] * 20], max_new_tokens=20)[0].usage.drafted
    assert set(threads) == {"kda-jax engine"} and threads["kda-jax engine"] >= 80


def test_a_seed_gives_the_same_tokens_in_any_company(one: Engine) -> None:
    warm = make_sampler(temperature=1.0)
    alone = one.generate([[4, 5]], max_new_tokens=10, sampler=warm, seed=3)[0].tokens
    beside = one.generate([[4, 5], [4, 5, 6], [4, 5]], max_new_tokens=10, sampler=warm, seed=3)
    assert beside[0].tokens == beside[2].tokens == alone
    assert one.generate([[4, 5]], max_new_tokens=10, sampler=warm, seed=4)[0].tokens != alone


def test_asyncio_gets_every_token_and_may_leave(one: Engine) -> None:
    async def talk() -> tuple[list[Token], Token]:
        stream, other = one.submit([3] * 70, max_new_tokens=20), one.submit([9], max_new_tokens=400)
        first = await anext(aiter(other))
        other.cancel()
        return [token async for token in stream], first

    tokens, first = asyncio.run(talk())
    assert [token.token for token in tokens] == cold([3] * 70, 20).tokens
    assert first.token == cold([9], 1).tokens[0]


def test_a_higher_priority_goes_first(one: Engine) -> None:
    low = [one.submit([at], max_new_tokens=40) for at in range(10)]
    high = one.submit([40], max_new_tokens=1, priority=1)
    soon, late = high.result(60.0).times.first_token_s, low[-1].result(60.0).times.first_token_s
    assert soon is not None and late is not None and soon < late
    for at, stream in enumerate(low):
        assert_cold([at], stream.result(60.0).tokens[:5], 5)


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(one: Engine) -> None:
    running = [one.submit([at], max_new_tokens=450, timeout=0.05) for at in range(4)]
    waiting = one.submit([5], max_new_tokens=450, timeout=0.01)
    assert waiting.result(60.0).reason == "expired" and not waiting.tokens()
    assert {stream.result(60.0).reason for stream in running} == {"expired"}


def test_tenants_share_nothing(one: Engine) -> None:
    prompt = random_prompts(3, 1)[0] + [1] * 70
    one.generate([prompt], max_new_tokens=2, tenant="a")
    cached = [
        one.generate([prompt], max_new_tokens=2, tenant=each)[0].usage.cached for each in ("b", "", "a")
    ]
    assert cached[:2] == [{}, {}] and cached[2]["device"] >= 64


@pytest.mark.parametrize(
    ("tokens", "options", "error", "message"),
    [
        ([], {}, ValueError, "at least one token"),
        ([CONFIG.vocab_size], {}, ValueError, "outside the vocabulary"),
        ([1], {"max_new_tokens": 0}, ValueError, "must be positive"),
        ([1], {"logprobs": -1}, ValueError, "not negative"),
        ([1], {"timeout": 0.0}, ValueError, "positive or None"),
        ([1], {"sampler": make_sampler(repetition_penalty=2.0)}, ValueError, "repetition_penalty"),
        ([1] * SIZES["max_tokens"], {}, Refused, "shorten the prompt"),
        ([1] * 60, {}, Overloaded, "come again later"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_served_is_refused(
    tokens: list[int], options: dict, error: type, message: str
) -> None:
    with engine(queued=50) as made, pytest.raises(error, match=message):
        made.submit(tokens, **{"max_new_tokens": 4, **options})


def test_a_closed_engine_ends_what_runs_and_takes_nothing() -> None:
    made = engine()
    stream = made.submit([1], max_new_tokens=500)
    made.close()
    made.close()
    assert stream.result(1.0).reason == "cancelled"
    with pytest.raises(Closed):
        made.submit([1], max_new_tokens=1)


def test_drain_waits_and_saves_what_it_cuts_off() -> None:
    with engine() as made:
        short = made.submit([1, 2], max_new_tokens=2)
        assert made.drain(60.0) and short.result(1.0).outcome is Outcome.FINISHED
        with pytest.raises(Closed, match="about to close"):
            made.submit([1], max_new_tokens=1)
    with engine() as made:
        prompt = [3] * 100
        long = made.submit(prompt, max_new_tokens=400)
        next(iter(long))
        assert not made.drain(0.05)
        cut = long.result(1.0)
        assert cut.reason == "cancelled" and cut.tokens
        kept = made.explain([*prompt, *cut.tokens])
        assert kept.boundary == len(prompt) + len(cut.tokens) - 1 and kept.state == "device"
    conserved(made)


def test_statistics_add_up(one: Engine) -> None:
    first, again = (one.generate([[5] * 130], max_new_tokens=4)[0] for _ in range(2))
    one.submit([6], max_new_tokens=400).cancel()
    numbers = one.statistics()
    assert first.usage.cached == {} and again.usage.cached == {"device": 128}
    assert numbers.ended == {"finished": 2, "cancelled": 1}
    assert numbers.restored_tokens == {"device": 128}
    assert numbers.computed_tokens in (132, 133) and numbers.generated_tokens >= 8
    assert numbers.first_token.count >= 2 and numbers.per_token.count >= 6
    assert 0 < min(numbers.per_token.recent) and numbers.step.total > 0
    assert (numbers.waiting, numbers.running, numbers.slots) == (0, 0, SIZES["slots"])
    assert numbers.pages == numbers.pages_free + numbers.pages_cached == one.layout.num_pages - 1
    assert numbers.tiers["device"].checkpoints >= 2 and numbers.remembered >= 2


def test_explain_says_what_limits_a_prompt() -> None:
    prompt, ends = [8] * 200, Creation(kinds=frozenset({Kind.PROMPT_END, Kind.GENERATION_END}))
    with engine(creation=ends) as one:
        assert one.explain(prompt) == Explanation(200, 0, None, {}, 0, (Limit(0, "parts here"),))
        made = one.generate([prompt], max_new_tokens=4)[0].tokens
        again = one.explain(prompt)
        assert (again.boundary, again.latents, again.known, again.limits) == (192, {"device": 192}, 200, ())
        branch = one.explain([*prompt[:150], 9, 9])
        assert branch.boundary == 0
        assert branch.limits == (Limit(128, "no checkpoint"), Limit(150, "parts here"))
        whole = one.explain([*prompt, *made[:3]])
        assert (whole.boundary, whole.limits) == (192, (Limit(203, "last token"),))
        assert one.explain(prompt, tenant="b").limits == (Limit(0, "parts here"),)
        one.generate([[7] * 100], max_new_tokens=1, tenant="b")
        assert Limit(99, "other namespace") in one.explain([7] * 100).limits
        assert one.explain([7] * 100, tenant="c").limits == (Limit(0, "parts here"),)


def test_explain_says_when_a_boundary_was_evicted(one: Engine) -> None:
    prompt = [8] * 200
    one.generate([prompt], max_new_tokens=1)
    while one.explain(prompt).boundary:
        one.generate(random_prompts(random.randrange(10**6), 20), max_new_tokens=1)
    limits = [limit for limit in one.explain(prompt).limits if limit.why == "evicted"]
    assert limits and all(limit.seconds is not None and 0 <= limit.seconds < 60 for limit in limits)
    assert one.statistics().evicted > 0


def test_the_tree_is_plain_values(one: Engine) -> None:
    for tenant in ("", "b"):
        one.generate([[8] * 200, [8] * 100 + [9] * 40], max_new_tokens=2, tenant=tenant)
    nodes = one.tree()
    assert len({node.namespace for node in nodes}) == 2
    assert [TreeNode(*each).stop for each in json.loads(json.dumps(nodes))] == [node.stop for node in nodes]
    ends = {node.stop: node for node in nodes if node.boundary and node.namespace == nodes[0].namespace}
    assert ends[192].kind == "prompt_end" and ends[192].states == ends[192].rows == ("device",)
    assert ends[201].kind == "generation_end"
    assert len(one.tree(most=3)) == 3 and {node.namespace for node in one.tree(most=2)} == {
        node.namespace for node in nodes
    }


def test_the_tree_shows_what_else_holds_a_checkpoint_and_its_pages(one: Engine) -> None:
    """One checkpoint and the pages before it, and not those of its neighbours."""
    one.generate([[8] * 200, [9] * 200], max_new_tokens=2)
    store = one._holder.store
    held = next(node for node in one.tree() if node.stop == 192)
    path = list(store.prompts.indexes[NAMESPACE.digest()].ancestors(held.id))
    key, pages = path[0][1].key, {at: node.names for at, node in path if node.names}
    assert key is not None and pages
    names = {state_name(key), *(page_name(page) for some in pages.values() for page in some)}
    nodes = tree(store, 500, 0.0, None, {Tier.DISK: names})
    assert [node.id for node in nodes if "disk" in node.states] == [held.id]
    assert {node.id for node in nodes if "disk" in node.rows} == set(pages)


def test_what_is_held_is_not_gone_through_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more boundaries have bytes than are remembered without, there is nothing to forget."""
    monkeypatch.setattr("kda_jax.engine.loop.REMEMBERED", 2)
    forgets, forget = [], Store.forget

    def counted(store: Store, most: int) -> Store:
        forgets.append(most)
        return forget(store, most)

    monkeypatch.setattr(Store, "forget", counted)
    with engine(nbytes=2**20, creation=Creation(kinds=frozenset({Kind.PROMPT_END}))) as made:
        for at in range(5):
            made.generate([[at + 1] * 65], max_new_tokens=1)
        assert made.statistics().remembered == 5 and len(forgets) <= 1
        made.generate([[9] * 65], max_new_tokens=30)
        assert len(forgets) <= 1


def test_sizes_that_do_not_fit_are_refused_before_anything_is_compiled() -> None:
    def progress(*told: object) -> None:
        raise AssertionError("compiled")

    with pytest.raises(ValueError, match="a budget of 64 tokens serves 4 rows"):
        engine(budget=64, programs=None, progress=progress)
