"""The server through OpenAI's own client: completions, chats, streams, cancels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openai
import pytest

from kda_jax.server import Limits
from server_engine import HALF_NAT, EchoEngine
from server_site import Site, byte_tokenizer, running, soon

CHAT: list = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture(scope="module")
def site(engine: EchoEngine) -> Iterator[Site]:
    """One server for all tests that leave it as it was."""
    with running(engine, limits=Limits(choices=4, new_tokens=9)) as site:
        yield site


def test_a_completion(site: Site, engine: EchoEngine) -> None:
    answer = site.client().completions.create(
        model="tiny", prompt="abc", max_tokens=5, seed=1, temperature=0.5, top_p=0.9, extra_body={"top_k": 7}
    )
    assert answer.object == "text_completion" and answer.model == "tiny" and answer.id.startswith("cmpl-")
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, "bcabc", "length")]
    usage = answer.usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        3,
        5,
        8,
    )
    given = engine.submitted[-1]
    assert given["tokens"] == [97, 98, 99] and given["max_new_tokens"] == 5 and given["seed"] == 1
    sampler = given["sampler"]
    assert (sampler.temperature, sampler.top_p, sampler.top_k) == (np.float32(0.5), np.float32(0.9), 7)


def test_what_was_restored_is_told(site: Site) -> None:
    ask = {"model": "tiny", "prompt": "restored", "max_tokens": 2}
    first, second = (site.client().completions.create(**ask).usage for _ in range(2))
    assert first is not None and second is not None
    assert first.prompt_tokens_details is not None and first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details is not None and second.prompt_tokens_details.cached_tokens == 7
    assert second.prompt_tokens_details.model_dump()["cached_tokens_by_tier"] == {"device": 7}


def test_defaults_are_openais(site: Site, engine: EchoEngine) -> None:
    site.client().completions.create(model="tiny", prompt=[1, 2])
    assert engine.submitted[-1]["max_new_tokens"] == 16
    assert engine.submitted[-1]["sampler"].temperature == 1.0 and engine.submitted[-1]["timeout"] is None
    site.client().chat.completions.create(model="tiny", messages=CHAT)
    assert engine.submitted[-1]["max_new_tokens"] == 9


def test_several_prompts_and_continuations(site: Site) -> None:
    answer = site.client().completions.create(model="tiny", prompt=["ab", "cde"], n=2, max_tokens=3, seed=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["aba", "bab", "cde", "dec"]
    assert (
        answer.usage is not None and answer.usage.prompt_tokens == 5 and answer.usage.completion_tokens == 12
    )


def test_tokens_are_prompts(site: Site, engine: EchoEngine) -> None:
    answer = site.client().completions.create(model="tiny", prompt=[[97], [98, 99]], max_tokens=2, seed=0)
    assert [choice.text for choice in answer.choices] == ["aa", "bc"]
    assert [given["tokens"] for given in engine.submitted[-2:]] == [[97], [98, 99]]


def test_a_stop_string_ends_it(site: Site, engine: EchoEngine) -> None:
    before = len(engine.cancelled)
    answer = site.client().completions.create(
        model="tiny", prompt="abcd", max_tokens=1500, seed=0, stop=["x", "cda"]
    )
    assert answer.choices[0].text == "ab" and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    assert len(engine.cancelled) == before + 1


def test_logprobs_of_a_completion(site: Site) -> None:
    answer = site.client().completions.create(
        model="tiny", prompt="abc", max_tokens=5, seed=0, logprobs=2, stop="ca"
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "ab" and logprobs is not None
    assert logprobs.tokens == ["a", "b"] and logprobs.token_logprobs == [HALF_NAT] * 2
    assert logprobs.text_offset == [0, 1]
    assert logprobs.top_logprobs == [{"\0": HALF_NAT, "\1": HALF_NAT - 1}] * 2
    bare = site.client().completions.create(model="tiny", prompt="abc", max_tokens=1, seed=0, logprobs=0)
    assert bare.choices[0].logprobs is not None and bare.choices[0].logprobs.top_logprobs is None
    assert bare.choices[0].logprobs.token_logprobs == [HALF_NAT]
    none = site.client().completions.create(model="tiny", prompt="abc", max_tokens=1)
    assert none.choices[0].logprobs is None


def test_a_chat(site: Site, engine: EchoEngine) -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c<eos>"}]
    messages: list = [{"role": "assistant", "content": "a"}, {"role": "user", "content": parts}]
    answer = site.client().chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=4, seed=1, logprobs=True, top_logprobs=1
    )
    assert engine.submitted[-1]["tokens"] == [259, 97, 258, 98, 99, *b"<eos>", 259]  # none of it is special
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "abc"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(each.token, each.bytes) for each in logprobs.content] == [
        ("a", [97]),
        ("<user>", list(b"<user>")),
        ("b", [98]),
        ("c", [99]),
    ]
    assert logprobs.content[0].top_logprobs[0].logprob == HALF_NAT


def test_a_stream_is_the_whole_in_pieces(site: Site) -> None:
    ask = {"model": "tiny", "prompt": "añ€", "max_tokens": 9, "seed": 0, "n": 2, "logprobs": 1}
    whole = site.client().completions.create(**ask)
    chunks = list(
        site.client().completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    first, last = whole.usage, chunks[-1].usage
    assert first is not None and last is not None
    assert (last.prompt_tokens, last.completion_tokens) == (first.prompt_tokens, first.completion_tokens)
    assert len({chunk.id for chunk in chunks}) == 1
    for index, choice in enumerate(whole.choices):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["length"]
        assert len(mine) > 5 and "�" not in "".join(c.text for c in mine[:4])
        found = [c.logprobs for c in mine if c.logprobs is not None]
        assert choice.logprobs is not None
        assert [token for each in found for token in each.tokens or ()] == choice.logprobs.tokens


def test_a_stream_ends_before_a_stop_string(site: Site) -> None:
    with site.client().completions.create(
        model="tiny", prompt="abcd", max_tokens=1500, seed=0, stop="cda", stream=True
    ) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == "ab" and chunks[-1].finish_reason == "stop"


def test_a_chats_stream(site: Site) -> None:
    chunks = list(
        site.client().chat.completions.create(model="tiny", messages=CHAT, seed=1, max_tokens=3, stream=True)
    )
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ab"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_stream_comes_as_it_is_made() -> None:
    engine = EchoEngine()
    engine.hold.clear()
    with running(engine) as site:
        stream = site.client().completions.create(
            model="tiny", prompt="ab", max_tokens=4, seed=0, stream=True
        )
        assert next(stream).choices[0].text == "a"
        assert site.ask("GET", "/live").json["requests"][0]["generated"] == 1
        engine.hold.set()
        assert "".join(chunk.choices[0].text for chunk in stream) == "bab"
        assert soon(lambda: site.ask("GET", "/live").json["requests"] == [])


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_who_hangs_up_is_cancelled(streams: bool) -> None:
    engine = EchoEngine()
    engine.hold.clear()
    with running(engine) as site:
        if streams:
            stream = site.client().completions.create(
                model="tiny", prompt="ab", n=2, max_tokens=99, stream=True
            )
            next(stream)
            stream.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                site.client().with_options(timeout=0.3).completions.create(
                    model="tiny", prompt="ab", n=2, max_tokens=99
                )
        assert soon(lambda: len(engine.cancelled) == 2)
        assert not engine.live and soon(lambda: site.ask("GET", "/live").json["requests"] == [])


def test_models(site: Site) -> None:
    assert [model.id for model in site.client().models.list()] == ["tiny"]
    assert site.client().models.retrieve("tiny").owned_by == "kda-jax"
    with pytest.raises(openai.NotFoundError, match="no model 'a/b' here; this server has 'tiny'"):
        site.client().models.retrieve("a/b")


def test_a_text_is_opened_by_the_models_token(engine: EchoEngine) -> None:
    with running(engine, tokenizer=byte_tokenizer(bos=True)) as site:
        site.client().completions.create(model="tiny", prompt=["", "a"], max_tokens=1)
        assert [given["tokens"] for given in engine.submitted[-2:]] == [[256], [256, 97]]
        site.client().completions.create(model="tiny", prompt=[5], max_tokens=1)
        assert engine.submitted[-1]["tokens"] == [5]
