"""The tokenizer of a model: ordinary text, special tokens, and the chat template.

Text is encoded as text: what looks like a special token in it stays text unless `parse_special=True` is
passed, and chat templates parse the special tokens of the template only, never those of a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kda_jax.tokenizer.chat import Escapes, render
from kda_jax.tokenizer.codecs import NUM_RESERVED, ByteCodec, Codec, JsonCodec, TiktokenCodec, reserved


class Tokenizer:
    """Text <-> token ids.

    Attributes:
        special_tokens: text -> id of the tokens that no ordinary text can produce.
        bos_token_id: id of the token that opens a text, if the model has one. `encode` does not add it.
        eos_token_id: id of the token that ends one. Chat models may stop at others: see the model's config.
        chat_template: jinja source, if the model has one.
    """

    def __init__(
        self,
        codec: Codec,
        special_tokens: Mapping[str, int] | None = None,
        *,
        bos: str | None = None,
        eos: str | None = None,
        shown: Sequence[str] = (),
        chat_template: str | None = None,
    ) -> None:
        """Makes a tokenizer.

        Args:
            codec: for the ordinary text.
            special_tokens: text -> id.
            bos: the special token that opens a text.
            eos: the one that ends it.
            shown: special tokens that `decode` shows even with `skip_special`, as those around tool calls.
            chat_template: jinja source.
        """
        self._codec = codec
        self.special_tokens = dict(special_tokens or {})
        for name in (bos, eos):
            if name is not None and name not in self.special_tokens:
                raise ValueError(
                    f"{name!r} is not among the special tokens {sorted(self.special_tokens)[:8]}"
                )
        self._bos, self._eos = bos, eos
        self.bos_token_id = None if bos is None else self.special_tokens[bos]
        self.eos_token_id = None if eos is None else self.special_tokens[eos]
        self.chat_template = chat_template
        self._name_of = {i: name for name, i in self.special_tokens.items()}
        self._shown = {self.special_tokens[name] for name in shown}
        longest_first = sorted(filter(None, self.special_tokens), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Ids of a text; nothing is added in front or behind.

        Args:
            text: what to encode.
            parse_special: read special tokens where the text spells them. Only for text that is trusted.
        """
        return list(self._encode_parts(text, None)) if parse_special else self._codec.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of ids; bytes that are no UTF-8, as those of half a character, become U+FFFD.

        Args:
            ids: token ids. One that no token has reads `<|reserved_token_ID|>`.
            skip_special: leave special tokens out.

        Raises:
            ValueError: if an id is negative.
        """
        return self.decode_bytes(ids, skip_special=skip_special).decode(errors="replace")

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        """`decode` before its bytes become characters."""
        parts: list[bytes] = []
        run: list[int] = []
        for i in map(int, ids):
            if i < 0:
                raise ValueError(f"token id {i} is negative")
            if i not in self._name_of:
                run.append(i)
                continue
            parts.append(self._codec.decode(run))
            run = []
            if not skip_special or i in self._shown:
                parts.append(self._name_of[i].encode())
        parts.append(self._codec.decode(run))
        return b"".join(parts)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Ids of a conversation, as the model's template writes it.

        Args:
            messages: one mapping a message, with "role" and "content".
            tools: descriptions of the functions that the model may call.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: more names for the template.

        Raises:
            ValueError: if the model has no template, or the template refuses the conversation.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template; encode the prompt as text")
        escapes = Escapes(self._special)
        text = render(
            self.chat_template,
            messages=escapes.hide(list(messages)),
            tools=escapes.hide(list(tools)) if tools else None,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._bos or "",
            eos_token=self._eos or "",
            **escapes.hide(variables),
        )
        return list(self._encode_parts(text, escapes))

    def _encode_parts(self, text: str, escapes: Escapes | None) -> Iterator[int]:
        for part in self._special.split(text):
            if part in self.special_tokens:
                yield self.special_tokens[part]
            elif part:
                yield from self._codec.encode(escapes.show(part) if escapes else part)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads the tokenizer of a model folder.

    Reads `tokenizer_config.json` and `chat_template.jinja` where they exist, and as the tokens: bytes, if the
    config's `tokenizer_class` is "ByteTokenizer"; else `tokenizer.json`; else `tiktoken.model`.

    Args:
        path: the model's folder.

    Raises:
        ValueError: if the folder holds no tokenizer, or one that cannot be read.
    """
    path = Path(path)
    config = _read_config(path / "tokenizer_config.json")
    added = {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
    special = {token["content"]: i for i, token in added.items()}
    shown = [token["content"] for token in added.values() if not token.get("special", True)]
    bos, eos = (_text_of(config.get(key)) for key in ("bos_token", "eos_token"))
    codec: Codec
    if config.get("tokenizer_class") == "ByteTokenizer":
        codec = ByteCodec()
    elif (path / "tokenizer.json").exists():
        codec = JsonCodec(path / "tokenizer.json")
        special, shown = codec.special_tokens((bos, eos)), []
    elif (path / "tiktoken.model").exists():
        codec = TiktokenCodec(path / "tiktoken.model")
        for i in set(range(codec.size, codec.size + NUM_RESERVED)) - added.keys():
            special[reserved(i).decode()] = i
    else:
        raise ValueError(
            f"{path} holds no tokenizer: neither tokenizer.json nor tiktoken.model, nor a "
            'tokenizer_config.json of "tokenizer_class": "ByteTokenizer"'
        )
    return Tokenizer(codec, special, bos=bos, eos=eos, shown=shown, chat_template=_template(path, config))


def _read_config(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no json file: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a json object, got {type(config).__name__}")
    return config


def _text_of(token: str | Mapping[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, Mapping) else token


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    if (path / "chat_template.jinja").exists():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
