"""Ordinary text <-> token ids: bytes, `tokenizer.json`, and Kimi's `tiktoken.model`."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

NUM_RESERVED = 256
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        *(
            r"[^\r\n\p{L}\p{N}]?"
            rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]{upper}"
            rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]{lower}"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            for upper, lower in ("*+", "+*")
        ),
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Kimi's tokenizer cuts text before merging bytes. Source: `pat_str` in Kimi's `tokenization_kimi.py`."""

_MAX_CHARS = 400_000  # Kimi's tokenizer encodes texts in pieces of this length,
_MAX_RUN = 25_000  # and cuts runs without whitespace, and runs of whitespace, at this one
_LONG_RUN = re.compile(rf"\s{{{_MAX_RUN + 1},}}|\S{{{_MAX_RUN + 1},}}")


@runtime_checkable
class Codec(Protocol):
    """Ordinary text <-> ids, without special tokens."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which nothing is special."""
        ...

    def decode(self, ids: list[int]) -> bytes:
        """UTF-8 of ids that are none of the special tokens; it may begin or end inside a character."""
        ...


class ByteCodec:
    """A token is a byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> bytes:
        return b"".join(bytes([i]) if i < 256 else reserved(i) for i in ids)


class JsonCodec:
    """A `tokenizer.json`, run by Hugging Face's `tokenizers`."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer as Runner

        try:
            self._runner = Runner.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{file} is no tokenizer of the tokenizers library: {error}") from None
        self._runner.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        return self._runner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> bytes:
        return self._runner.decode(ids, skip_special_tokens=False).encode()

    def special_tokens(self, names: Iterable[str | None] = ()) -> dict[str, int]:
        """Text -> id of the tokens that the file marks as special, and of more by name where it has them."""
        added = self._runner.get_added_tokens_decoder()
        named = {name: self._runner.token_to_id(name) for name in names if name is not None}
        marked = {token.content: i for i, token in added.items() if token.special}
        return marked | {name: i for name, i in named.items() if i is not None}


class TiktokenCodec:
    """Kimi's `tiktoken.model`: one line a token, its bytes in base64 and its rank, which is its id."""

    def __init__(self, file: Path) -> None:
        try:
            import tiktoken
        except ImportError:
            raise ValueError(f"{file} needs tiktoken: pip install 'kda-jax[tiktoken]'") from None
        try:
            pairs = (line.split() for line in file.read_bytes().splitlines() if line.strip())
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
            self._runner = tiktoken.Encoding(
                file.name, pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={}
            )
        except ValueError as error:
            raise ValueError(f"{file} is no list of tokens in base64 and their ranks: {error}") from None
        self.size = len(ranks)

    def encode(self, text: str) -> list[int]:
        return [i for piece in _pieces(text) for i in self._runner.encode_ordinary(piece)]

    def decode(self, ids: list[int]) -> bytes:
        return b"".join(
            self._runner.decode_single_token_bytes(i) if i < self.size else reserved(i) for i in ids
        )


def reserved(token_id: int) -> bytes:
    """The name of a token that has none."""
    return b"<|reserved_token_%d|>" % token_id


def _pieces(text: str) -> Iterator[str]:
    for at in range(0, len(text), _MAX_CHARS):
        piece = text[at : at + _MAX_CHARS]
        start = 0
        for run in _LONG_RUN.finditer(piece):
            for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                yield piece[start:cut]
                start = cut
        yield piece[start:]
