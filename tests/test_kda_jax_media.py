"""Images in a prompt: refused with one line wherever tokens or text come in, since only the text model is here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.commands import run
from kda_jax.config import ModelConfig
from kda_jax.forward import check_tokens, decode, prefill
from kda_jax.generate import generate
from kda_jax.model import Model
from kda_jax.state import empty
from kda_jax.tokenizer import ByteCodec, Tokenizer
from kda_jax.weights import load_state, save, save_state
from random_model import K3, random_model, small_config

MEDIA = 41
REFUSED = rf"^the tokens hold 2 image placeholder\(s\), id {MEDIA}; only text can be read: leave images out$"
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|media_pad|>{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(small_config(**K3, media_placeholder_token_id=MEDIA))


@pytest.fixture
def tokenizer() -> Tokenizer:
    special = {"[BOS]": 256, "<|media_begin|>": 257, "<|media_pad|>": 258}
    return Tokenizer(ByteCodec(), special, chat_template=TEMPLATE)


def test_the_config_names_the_placeholder_beside_its_text_part() -> None:
    config = ModelConfig.kimi_k3()
    assert config.media_placeholder_token_id == 163605
    fields = config.to_hf()
    assert fields["media_placeholder_token_id"] == 163605
    assert "media_placeholder_token_id" not in fields["text_config"]
    assert ModelConfig.from_hf(fields) == config
    del fields["media_placeholder_token_id"]
    assert ModelConfig.from_hf(fields) == dataclasses.replace(config, media_placeholder_token_id=None)


@pytest.mark.parametrize(
    "read",
    [
        lambda model: prefill(model, [[1, MEDIA, MEDIA, 2]]),
        lambda model: prefill(model, [[1, 2], [MEDIA, MEDIA]], lengths=[2, 2]),
        lambda model: decode(model, [MEDIA, MEDIA], empty(model.config, 2, 64)),
        lambda model: generate(model, [1, MEDIA, MEDIA]),
    ],
    ids=["prefill", "any row", "decode", "generate"],
)
def test_placeholders_among_tokens_are_refused(read: Callable[[Model], Any], model: Model) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        read(model)


def test_other_tokens_and_other_models_are_not_refused(model: Model) -> None:
    assert check_tokens([[MEDIA - 1, MEDIA + 1]], model.config, 2).tolist() == [[MEDIA - 1, MEDIA + 1]]
    assert check_tokens([[MEDIA]], small_config(), 2).tolist() == [[MEDIA]]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (
            lambda tokenizer: tokenizer.encode("see <|media_begin|><|media_pad|>", parse_special=True),
            r"^the prompt holds an image placeholder, <\|media_pad\|>; only text can be read: leave images out$",
        ),
        (
            lambda tokenizer: tokenizer.apply_chat_template(
                [{"role": "user", "content": [{"type": "audio"}]}]
            ),
            r"^the prompt holds an image placeholder, <\|media_pad\|>; only text can be read: leave images out$",
        ),
        *(
            (
                lambda tokenizer, kind=kind: tokenizer.apply_chat_template(
                    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}]
                ),
                rf"^a message holds a part of type '{kind}'; only text can be read: leave images out$",
            )
            for kind in ("image", "image_url", "input_image", "video_url")
        ),
    ],
    ids=["spelled", "by the template", "image", "image_url", "input_image", "video_url"],
)
def test_images_in_text_are_refused(
    write: Callable[[Tokenizer], list[int]], words: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match=words):
        write(tokenizer)


def test_words_about_images_are_text(tokenizer: Tokenizer) -> None:
    text = "<|media_pad|> an image"
    assert tokenizer.encode(text) == list(text.encode())
    for content in (text, [{"type": "text", "text": text}]):
        assert tokenizer.apply_chat_template([{"role": "user", "content": content}]) == list(text.encode())
    without = Tokenizer(ByteCodec(), {"[BOS]": 256})
    assert without.encode("<|media_pad|>", parse_special=True) == list(b"<|media_pad|>")


def test_the_command_line_refuses_in_one_line(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(model, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["media_placeholder_token_id"] == MEDIA
    assert run(["generate", str(tmp_path / "model"), "--token-ids", f"1 {MEDIA} {MEDIA}"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"kda_jax: the tokens hold 2 image placeholder(s), id {MEDIA}; only text can be read: leave images out\n"
    )


def test_a_state_saved_before_the_config_named_it_is_read(model: Model, tmp_path: Path) -> None:
    before = dataclasses.replace(model.config, media_placeholder_token_id=None)
    save_state(tmp_path / "state", empty(before, 1, 64), before)
    state = load_state(tmp_path / "state", model.config)
    np.testing.assert_array_equal(state.position, jnp.zeros(1, jnp.int32))
