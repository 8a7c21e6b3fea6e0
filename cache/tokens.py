"""Token ids as the cache wants them, and media between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from immutables import Map
from numpy.typing import ArrayLike, NDArray

Tokens: TypeAlias = NDArray[np.int32]


class Media(NamedTuple):
    """An image, say, that the model sees in place of placeholder tokens.

    Attributes:
        position: of its first placeholder in the prompt, from 0.
        digest: of its contents and of how they were processed.
    """

    position: int
    digest: bytes


def as_tokens(tokens: ArrayLike) -> Tokens:
    """Token ids as a one-dimensional int32 array, without a copy where they are one already.

    Raises:
        ValueError: for other shapes, for what is no integer, and for ids outside [0, 2^31).
    """
    array = np.asarray(tokens)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids are a row of integers, got {array.dtype} of shape {array.shape}")
    array = array.astype(np.int32) if array.dtype.itemsize < 4 else array
    # as unsigned numbers, those below 0 are the largest: one pass finds both ends
    if int(array.view(array.dtype.str.replace("i", "u")).max()) >= 2**31:
        raise ValueError(f"token ids lie in [0, 2**31), got {array.min()} to {array.max()}")
    return array.astype(np.int32, copy=False)


def check_media(media: Iterable[Media], num_tokens: int) -> tuple[Media, ...]:
    """Media in the order of their positions.

    Raises:
        ValueError: for two at one position, and for one outside the prompt.
    """
    ordered = tuple(sorted(media))
    if not ordered:
        return ()
    positions = [item.position for item in ordered]
    if len(set(positions)) < len(positions):
        raise ValueError(f"two media begin at one position: {positions}")
    if positions[0] < 0 or positions[-1] >= num_tokens:
        raise ValueError(f"media begin at {positions}, outside the {num_tokens} tokens of the prompt")
    return ordered


class MediaIds(NamedTuple):
    """Small numbers for media digests, so that tokens with media compare exactly and as fast as tokens without.

    An image's first placeholder gets a negative id of its own, given out once a digest; the placeholders behind it
    stay, so that two short images and one long image differ. Ids hold in one process only: keys are made from digests.
    """

    ids: Map[bytes, int] = Map()

    def know(self, media: Sequence[Media]) -> MediaIds:
        """With an id for each of these."""
        ids = self.ids
        for item in media:
            if item.digest not in ids:
                ids = ids.set(item.digest, -1 - len(ids))
        return self if ids is self.ids else MediaIds(ids)

    def fold(self, tokens: Tokens, media: Sequence[Media]) -> Tokens:
        """Tokens with ids in place of each medium's first placeholder. One that no id was given to matches nothing."""
        if not media:
            return tokens
        folded = tokens.copy()
        for item in media:
            folded[item.position] = self.ids.get(item.digest, np.iinfo(np.int32).min)
        return folded
