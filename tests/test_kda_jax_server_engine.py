"""The server over the real engine: the engine's tokens, what was restored, and nothing left behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from engine_site import CONFIG, SIZES, cold, conserved, engine

from kda_jax.engine import Engine
from kda_jax.server import Keys, Limits, Tenant
from kda_jax.tokenizer import Tokenizer
from server_site import Site, running, soon

PROMPT = "THE SAME BEGINNING OF A FEW PROMPTS, LONG ENOUGH FOR A CHECKPOINT ON THE GRID, AND THEN SOME MORE"
KEYS = {f"sk-{name}": Tenant(name, f"salt-of-{name}", False) for name in ("alice", "bob")}


class Capitals:
    """A token a character from the blank on, as many as the small model has."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) - 32 for character in text]

    def decode(self, ids: list[int]) -> bytes:
        return bytes(i + 32 for i in ids)


TOKENIZER = Tokenizer(Capitals())
SERVED: dict[str, Any] = dict(tokenizer=TOKENIZER, vocab_size=CONFIG.vocab_size, context=SIZES["max_tokens"])


@pytest.fixture(scope="module")
def behind() -> Iterator[Engine]:
    with engine() as made:
        yield made


@pytest.fixture(scope="module")
def site(behind: Engine) -> Iterator[Site]:
    with running(behind, keys=Keys(KEYS), **SERVED) as site:
        yield site


def test_tokens_are_the_engines_and_the_next_turn_resumes(site: Site) -> None:
    client = site.client("sk-alice")
    alone = cold(TOKENIZER.encode(PROMPT), 8).tokens
    first = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=1)
    assert first.choices[0].text == TOKENIZER.decode(alone)
    logprobs = first.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert logprobs.token_logprobs == [max(top.values()) for top in logprobs.top_logprobs]  # greedy
    turn = [*TOKENIZER.encode(PROMPT), *alone, *TOKENIZER.encode("AND?")]
    explained = site.ask("POST", "/explain", {"prompt": turn}, key="sk-alice").json
    second = client.completions.create(model="tiny", prompt=turn, max_tokens=4, temperature=0)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == explained["boundary"] > len(PROMPT)
    assert second.choices[0].text == TOKENIZER.decode(cold(turn, 4).tokens)
    other = site.client("sk-bob").completions.create(model="tiny", prompt=turn, max_tokens=1)
    assert other.usage is not None and other.usage.prompt_tokens_details is not None
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_each_sees_his_tree(site: Site) -> None:
    site.client("sk-alice").completions.create(model="tiny", prompt="X" * 70, max_tokens=1)
    trees = {key: site.ask("GET", "/live", key=key).json["tree"] for key in KEYS}
    assert len(trees["sk-alice"]) > len(trees["sk-bob"])
    assert len({node["namespace"] for node in trees["sk-alice"]}) == 1
    assert {node["namespace"] for node in trees["sk-alice"]}.isdisjoint(
        node["namespace"] for node in trees["sk-bob"]
    )


def test_who_hangs_up_leaves_nothing_behind(site: Site, behind: Engine) -> None:
    stream = site.client("sk-bob").completions.create(model="tiny", prompt="AB", max_tokens=400, stream=True)
    next(stream)
    stream.close()
    assert soon(lambda: behind.statistics().running == 0)
    assert behind.statistics().ended["cancelled"] == 1
    conserved(behind)


def test_metrics_of_a_real_engine() -> None:
    with engine() as behind, running(behind, **SERVED) as site:
        site.client().completions.create(model="tiny", prompt="AB", max_tokens=3)
        body = site.ask("GET", "/metrics").body.decode()
        assert "kda_generated_tokens_total 3.0" in body
        assert 'kda_prompt_tokens_total{source="computed"} 2.0' in body
        assert 'kda_requests_ended_total{outcome="finished"} 1.0' in body
        assert site.ask("GET", "/live").json["engine"]["generated_tokens"] == 3
        site.serving.draining = True
        assert behind.drain(1.0)
        assert site.ask("GET", "/health").status == 503


def test_what_a_drain_cuts_short_is_checkpointed() -> None:
    with engine() as behind, running(behind, limits=Limits(drain_s=0.05), **SERVED) as site:
        stream = site.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=400, stream=True)
        text = next(stream).choices[0].text
        site.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError, match="shutting down"):
            for chunk in stream:
                text += chunk.choices[0].text
        assert soon(lambda: site.server.should_exit) and not site.server.all_finished
        assert behind.explain(TOKENIZER.encode(f"{PROMPT}{text}!")).boundary >= len(PROMPT) + len(text) - 1
