"""Names of prefixes: digests chained over units of tokens.

A key names exactly a namespace and the tokens (and media) before a boundary, the same in every process. A prompt that
grows is hashed on from where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from cache.namespace import DIGEST_NBYTES
from cache.tokens import Media, Tokens, as_tokens, check_media

UNIT = 512
"""Tokens a link of the chain. At 512, a chain takes at most twice the time of one hash over its bytes."""


class KeyChain(NamedTuple):
    """The key of the tokens so far, ready to take more.

    Attributes:
        unit: tokens a link.
        length: tokens so far.
        link: key of the last whole unit; before there is one, a digest of the namespace and the unit.
        tail: the tokens behind it, fewer than a unit.
        media: the media that begin in the tail.
        added: keys of the units that the last `extend` completed, in order.
    """

    unit: int
    length: int
    link: bytes
    tail: Tokens
    media: tuple[Media, ...] = ()
    added: tuple[bytes, ...] = ()

    @classmethod
    def start(cls, namespace: bytes, unit: int = UNIT) -> KeyChain:
        """The chain before the first token.

        Args:
            namespace: `Namespace.digest()`.
            unit: tokens a link. Chains of other units give other keys, since a checkpoint holds the rows behind its
                last whole page.

        Raises:
            ValueError: for a digest of another length, and for a unit that is not positive.
        """
        if len(namespace) != DIGEST_NBYTES:
            raise ValueError(
                f"a namespace has {DIGEST_NBYTES} bytes, got {len(namespace)}; see Namespace.digest"
            )
        if unit < 1:
            raise ValueError(f"{unit=} must be positive: it is how many tokens a link of the chain has")
        first = hashlib.blake2b(namespace + _number(unit), digest_size=DIGEST_NBYTES).digest()
        return cls.resume(first, 0, unit)

    @classmethod
    def resume(cls, link: bytes, length: int, unit: int = UNIT) -> KeyChain:
        """The chain behind a whole unit whose key is known.

        Raises:
            ValueError: if `length` is no multiple of `unit`.
        """
        if length % unit:
            raise ValueError(f"{length=} must be a multiple of {unit=}: keys are links at whole units")
        return cls(unit, length, link, np.empty(0, np.int32))

    @property
    def key(self) -> bytes:
        """The key of all tokens so far."""
        if not len(self.tail):
            return self.link
        return _link(self.link, self.tail, self.media, self.length - len(self.tail))

    def extend(self, tokens: ArrayLike, media: Sequence[Media] = ()) -> KeyChain:
        """The chain behind more tokens, at the cost of these alone.

        Args:
            tokens: ids, `[T]`.
            media: those that begin in them, at positions counted from the first token of the sequence.

        Raises:
            ValueError: for ids that are none, and for media outside of `tokens`.
        """
        tokens = as_tokens(tokens)
        new = check_media((m._replace(position=m.position - self.length) for m in media), len(tokens))
        return self.grown(tokens, [m._replace(position=m.position + self.length) for m in new])

    def grown(self, tokens: Tokens, media: Sequence[Media] = ()) -> KeyChain:
        """As `extend`, by what was checked before: tokens from `as_tokens`, and media in the order of their positions,
        each inside of `tokens`."""
        media, base = (*self.media, *media), self.length - len(self.tail)
        tokens = np.concatenate([self.tail, tokens]) if len(self.tail) else tokens
        whole = len(tokens) // self.unit * self.unit
        added = _links(self.link, tokens[:whole], media, base, self.unit)
        return KeyChain(
            self.unit,
            base + len(tokens),
            added[-1] if added else self.link,
            tokens[whole:].copy(),
            tuple(m for m in media if m.position >= base + whole),
            tuple(added),
        )


def _links(link: bytes, tokens: Tokens, media: Sequence[Media], base: int, unit: int) -> list[bytes]:
    """Keys of whole units, the first of which begins at `base`."""
    links = []
    if media:
        for at in range(0, len(tokens), unit):
            inside = [m for m in media if at <= m.position - base < at + unit]
            link = _link(link, tokens[at : at + unit], inside, base + at)
            links.append(link)
        return links
    data, size, count = tokens.astype("<i4", copy=False).tobytes(), 4 * unit, _number(unit)
    for at in range(0, len(data), size):
        link = hashlib.blake2b(link + count + data[at : at + size], digest_size=DIGEST_NBYTES).digest()
        links.append(link)
    return links


def _link(link: bytes, tokens: Tokens, media: Sequence[Media], base: int) -> bytes:
    """One link: the key before, how many tokens, the tokens, and each medium's offset in them, length and digest."""
    parts = [link, _number(len(tokens)), tokens.astype("<i4", copy=False).tobytes()]
    for item in media:
        parts += [_number(item.position - base), _number(len(item.digest)), item.digest]
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST_NBYTES).digest()


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
