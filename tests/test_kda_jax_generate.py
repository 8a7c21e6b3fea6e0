"""Generation: the tokens of the plain loop, the exact state behind them, and text that shows nothing too early."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import jax
import numpy as np
import pytest

from kda_jax.commands.generate import generate as command
from kda_jax.forward import SplitModel, decode, prefill, split
from kda_jax.generate import decode_tokens, generate, stream
from kda_jax.generate.text import TextStream
from kda_jax.sampling import make_sampler
from kda_jax.state import ModelState
from kda_jax.tokenizer import ByteCodec, Tokenizer
from random_model import random_model, small_config

VOCAB = 256
PROMPT = np.random.default_rng(0).integers(0, VOCAB, 20).tolist()
CHANCE: dict[str, Any] = dict(
    temperature=1.2, top_k=100, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=3
)
TOKENIZER = Tokenizer(ByteCodec())


@pytest.fixture(scope="module")
def parts() -> SplitModel:
    return split(random_model(small_config(vocab_size=VOCAB, eos_token_id=None, model_max_length=160)))


def greedy(parts: SplitModel, count: int) -> tuple[list[int], ModelState]:
    """The plain loop: one call a token."""
    logits, state = prefill(parts, [PROMPT], last_only=True, capacity=len(PROMPT) + count)
    logits, tokens = logits[:, 0], []
    for _ in range(count):
        tokens.append(int(np.argmax(logits)))
        logits, state = decode(parts, tokens[-1:], state)
    return tokens, state


def assert_same(want: ModelState, got: ModelState) -> None:
    count = int(want.position[0])
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got)):
        a, b = np.asarray(a), np.asarray(b)
        if a.ndim == 3 and a.shape[1] >= count:  # latents, of which the rest is dead
            a, b = a[:, :count], b[:, :count]
        np.testing.assert_array_equal(a, b)


def test_the_ways_to_generate_have_the_same_options() -> None:
    options = inspect.signature(generate).parameters
    assert options == inspect.signature(stream).parameters
    for narrower in (make_sampler, command):
        shared = inspect.signature(narrower).parameters
        same = {name: shared[name].default for name in options if name in shared and name != "model"}
        assert same == {name: options[name].default for name in same}
    assert len(same) >= 8


def joined(pieces: Sequence[str | int]) -> str:
    return "".join(map(str, pieces))


@pytest.mark.optimised
@pytest.mark.slow
def test_greedy_tokens_and_state_are_those_of_the_plain_loop(parts: SplitModel) -> None:
    tokens, state = greedy(parts, 12)
    got = generate(parts, PROMPT, max_new_tokens=12)
    assert got.tokens == tokens
    assert (got.text, got.finish_reason) == ("", "length")
    assert_same(state, got.state)


@pytest.mark.parametrize("options", [{}, CHANCE], ids=["greedy", "chance"])
def test_how_many_tokens_a_dispatch_makes_changes_nothing(parts: SplitModel, options: dict[str, Any]) -> None:
    whole = generate(parts, PROMPT, max_new_tokens=100, **options)
    assert len(whole.tokens) == 100
    for count in (1, 5, 37):
        part = generate(parts, PROMPT, max_new_tokens=count, **options)
        assert part.tokens == whole.tokens[:count]
    assert list(stream(parts, PROMPT, max_new_tokens=100, **options)) == whole.tokens


def test_another_seed_is_another_text(parts: SplitModel) -> None:
    texts = {
        tuple(generate(parts, PROMPT, max_new_tokens=8, temperature=1.0, seed=s).tokens) for s in range(4)
    }
    assert len(texts) == 4


@pytest.mark.parametrize("options", [{}, CHANCE], ids=["greedy", "chance"])
@pytest.mark.optimised
def test_stops_before_a_stop_token(parts: SplitModel, options: dict[str, Any]) -> None:
    whole = generate(parts, PROMPT, max_new_tokens=40, **options).tokens
    for at in (0, 1, 9):
        end = whole[at]
        kept = whole[: whole.index(end)]
        got = generate(parts, PROMPT, max_new_tokens=40, stop_tokens=[end, 10**6], **options)
        assert (got.tokens, got.finish_reason) == (kept, "stop")
        assert got.state.position.tolist() == [len(PROMPT) + len(kept)]
        again = generate(parts, PROMPT, max_new_tokens=len(kept), **options)
        assert_same(again.state, got.state)


def test_the_configs_end_of_text_is_the_default_stop() -> None:
    model = random_model(small_config(vocab_size=VOCAB))
    first = generate(model, PROMPT, max_new_tokens=1, stop_tokens=()).tokens[0]
    ended = random_model(small_config(vocab_size=VOCAB, eos_token_id=first))
    got = generate(ended, PROMPT)
    assert (got.tokens, got.finish_reason) == ([], "stop")
    assert generate(ended, PROMPT, max_new_tokens=1, stop_tokens=()).tokens == [first]


@pytest.mark.parametrize(("start", "width"), [(0, 1), (4, 3), (17, 1), (14, 20), (40, 2)])
def test_stops_before_a_stop_string(parts: SplitModel, start: int, width: int) -> None:
    whole = generate(parts, PROMPT, max_new_tokens=90, tokenizer=TOKENIZER, **CHANCE)
    stop = whole.text[start : start + width]
    kept = whole.text[: whole.text.index(stop)]
    pieces = list(stream(parts, PROMPT, max_new_tokens=90, tokenizer=TOKENIZER, stop=stop, **CHANCE))
    assert joined(pieces) == kept
    got = generate(
        parts, PROMPT, max_new_tokens=90, tokenizer=TOKENIZER, stop=[stop, "no such text"], **CHANCE
    )
    assert (got.text, got.finish_reason) == (kept, "stop")
    assert got.tokens == whole.tokens[: len(got.tokens)]
    assert kept.startswith(TOKENIZER.decode(got.tokens))
    again = generate(parts, PROMPT, max_new_tokens=len(got.tokens), **CHANCE)
    assert_same(again.state, got.state)


def test_goes_on_from_a_state_and_leaves_it_as_it_was(parts: SplitModel) -> None:
    first = generate(parts, PROMPT, max_new_tokens=10)
    before = jax.tree.map(np.array, first.state)
    more = generate(parts, [7, 8, 9], state=first.state, max_new_tokens=10)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, first.state))
    assert more.state.position.tolist() == [43]
    assert generate(parts, [7, 8, 9], state=first.state, max_new_tokens=10).tokens == more.tokens
    assert generate(parts, [*PROMPT, *first.tokens, 7, 8, 9], max_new_tokens=10).tokens == more.tokens


def test_ends_at_the_models_limit(parts: SplitModel) -> None:
    got = generate(parts, PROMPT * 8, max_new_tokens=10)
    assert (got.tokens, got.finish_reason) == ([], "length")
    got = generate(parts, (PROMPT * 8)[:155], max_new_tokens=10)
    assert (len(got.tokens), got.finish_reason) == (5, "length")


def test_rows_decode_side_by_side(parts: SplitModel) -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    logits, state = prefill(parts, prompts, last_only=True)
    token = np.argmax(logits[:, 0], axis=-1)
    tokens, end = decode_tokens(parts, token, state, 70)
    assert tokens.shape == (2, 70)
    for row, prompt in enumerate(prompts):
        assert generate(parts, prompt, max_new_tokens=70).tokens == tokens[row].tolist()
    assert end.position.tolist() == [90, 90]
    assert state.position.tolist() == [20, 20]
    early, state = decode_tokens(parts, token, state, 5)
    late, _ = decode_tokens(parts, tokens[:, 5], state, 65)
    np.testing.assert_array_equal(np.concatenate([early, late], axis=1), tokens)
    chance = make_sampler(temperature=1.0)
    drawn, _ = decode_tokens(
        parts, [5, 5], jax.tree.map(lambda x: x[:1].repeat(2, 0), state), 9, sampler=chance
    )
    assert drawn[0].tolist() != drawn[1].tolist()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([1, VOCAB], {}, f"{VOCAB} lies outside"),
        ([1] * 161, {}, "161 tokens; the model takes 160"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens=-1"),
        ([1], {"temperature": -1.0}, "temperature=-1.0"),
        ([1], {"stop": "x"}, "needs a tokenizer"),
        ([1], {"stop": "", "tokenizer": TOKENIZER}, "not empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_says_what_is_wrong(parts: SplitModel, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(parts, prompt, **options)


def test_says_that_tokens_must_be_integers(parts: SplitModel) -> None:
    with pytest.raises(ValueError, match="tokens must be integers, got float64"):
        prefill(parts, np.array([[1.5]]))


def feed(text: str | bytes, stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    """The pieces of a text that comes byte by byte, and the stream behind it."""
    pieces, collected = [], TextStream(TOKENIZER.decode, stop)
    for byte in text.encode() if isinstance(text, str) else text:
        pieces.append(collected.push(byte))
        if collected.stopped:
            break
    pieces.append(collected.finish())
    return pieces, collected


@pytest.mark.parametrize("text", ["plain", "naïve €3 😀!", "a\ufffdb", "😀"])
def test_a_character_is_shown_whole(text: str) -> None:
    pieces, collected = feed(text)
    assert joined(pieces) == collected.text == text
    assert all(piece in text for piece in pieces)  # half a character would show as one that the text has not
    assert pieces[0] == ("" if ord(text[0]) > 127 else text[0])


@pytest.mark.parametrize("data", [b"\xff\xfe\xfd ok", b"a\xe2\x82", b"\xf0\x9f\xff\x80x", b"\xff" * 50])
def test_bytes_that_are_no_text_are_replaced(data: bytes) -> None:
    pieces, collected = feed(data)
    assert joined(pieces) == collected.text == data.decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "stop", "kept", "num_kept"),
    [
        ("one STOP two", ["STOP"], "one ", 4),
        ("ab aba abac!", ["abac"], "ab aba ", 7),
        ("aaab", ["aab"], "a", 1),
        ("x€y", ["€"], "x", 1),
        ("é€", ["€"], "é", 2),
        ("nothing here", ["hers"], "nothing here", 12),
        ("both end", ["end", "th e"], "bo", 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_stop_string_is_never_shown(text: str, stop: list[str], kept: str, num_kept: int) -> None:
    pieces, collected = feed(text, stop)
    assert joined(pieces) == collected.text == kept
    assert collected.num_kept == num_kept
    assert collected.stopped == (kept != text)


def test_what_a_stop_string_may_still_reach_into_is_not_safe() -> None:
    collected = TextStream(TOKENIZER.decode, ["STOP"])
    safe = []
    for byte in b"a STA STOX":
        collected.push(byte)
        safe.append(collected.num_safe)
    assert safe == [1, 2, 2, 2, 5, 6, 6, 6, 6, 10]


def test_what_is_safe_takes_no_more_work_in_a_long_text() -> None:
    """Counted in steps of the interpreter: twice the text, twice the steps."""

    def steps(count: int) -> int:
        collected, seen = TextStream(TOKENIZER.decode, ["STOP"]), [0]

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            if frame.f_code.co_filename.endswith("text.py"):
                seen[0] += 1
                return trace
            return None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for i in range(count):
                collected.push(b"no STO yet"[i % 10])
                assert collected.num_safe in range(i - 3, i + 2)
        finally:
            sys.settrace(before)
        return seen[0]

    assert steps(400) < 2.2 * steps(200)


def test_tokens_whose_text_depends_on_the_one_before() -> None:
    """As SentencePiece's do: the first token of a call loses its space."""
    words = ["▁to", "▁be", "▁or", "!"]
    collected = TextStream(lambda ids: "".join(words[i] for i in ids).replace("▁", " ").lstrip())
    pieces = [collected.push(i) for i in (0, 1, 2, 3, 1)]
    assert pieces == ["to", " be", " or", "!", " be"]
