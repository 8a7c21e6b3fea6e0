"""Which boundaries of which prompts are remembered, over all namespaces, and how to find one by its key."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from immutables import Map
from numpy.typing import ArrayLike, NDArray

from cache.index import Index, Match
from cache.keys import KeyChain
from cache.node import Node, whole_pages
from cache.retention.protocol import Kind
from cache.tier import Tier
from cache.tokens import Media, MediaIds, Tokens, as_tokens, check_media
from cache.view import View


class Place(NamedTuple):
    """Where a boundary lies, and what is known of it.

    Attributes:
        namespace: digest.
        node: id of its node in the namespace's index.
        kind: why it was made first.
        turn: prompts that had ended on its path when it was made.
    """

    namespace: bytes
    node: int
    kind: Kind
    turn: int


class Prompts(NamedTuple):
    """An immutable value.

    Attributes:
        page: latent rows a page, and the unit of keys.
        indexes: by namespace.
        places: of every remembered boundary, by key.
        media: small numbers for the digests of media.
    """

    page: int
    indexes: Map[bytes, Index]
    places: Map[bytes, Place]
    media: MediaIds

    @classmethod
    def empty(cls, page: int) -> Prompts:
        """Without a boundary."""
        return cls(page=page, indexes=Map(), places=Map(), media=MediaIds())

    def find(self, namespace: bytes, tokens: Tokens, media: Sequence[Media]) -> tuple[Index, Tokens, Match]:
        """The index of a namespace, the tokens as it has them, and its match of them."""
        index = self.indexes.get(namespace) or Index.empty(self.page)
        folded = self.media.fold(tokens, check_media(media, len(tokens)))
        return index, folded, index.match(folded)

    def remember(
        self,
        namespace: bytes,
        tokens: ArrayLike,
        media: Sequence[Media],
        kind: Kind,
        now: float,
        seen: View | None = None,
    ) -> tuple[Prompts, bytes]:
        """With the boundary behind `tokens`, and its key. What a view names is neither followed nor hashed again."""
        tokens = np.asarray(tokens)
        passed, known = self._passed(namespace, tokens, media, seen), self
        if passed is None:
            tokens = as_tokens(tokens)
            known = self._with(media=self.media.know(check_media(media, len(tokens)))) if media else self
            index, folded, match = known.find(namespace, tokens, media)
        elif passed[0] == len(tokens):
            return self, passed[1]
        else:
            index, folded = self.indexes[namespace], tokens
            match = index.match(tokens, self.places[passed[1]].node)
        chain = _chain(namespace, tokens, media, index, match)
        key = chain.key
        if key in self.places:
            return self, key
        index, node = index.insert(folded, key, chain.added, now, match)
        parent = index.parent(node)
        above = self.places[parent] if parent is not None else None
        turn = above.turn + (above.kind is Kind.PROMPT_END) if above else 0
        places = self.places.set(key, Place(namespace, node, kind, turn))
        return known._with(indexes=self.indexes.set(namespace, index), places=places), key

    def forget(self, key: bytes) -> Prompts:
        """Without a boundary that no tier holds and that is not pinned."""
        prompts = self.set_index(key, self.index(key).remove(self.places[key].node))
        return prompts._with(places=self.places.delete(key))

    def index(self, key: bytes) -> Index:
        """The index that a boundary lies in."""
        return self.indexes[self.places[key].namespace]

    def set_index(self, key: bytes, index: Index) -> Prompts:
        """With another version of that index."""
        return self._with(indexes=self.indexes.set(self.places[key].namespace, index))

    def node(self, key: bytes) -> Node:
        """The node that ends at a boundary."""
        return self.index(key).nodes[self.places[key].node]

    def lacks(self, key: bytes, tier: Tier) -> tuple[bytes, ...]:
        """Names of the pages before a boundary that a tier does not hold, in order."""
        nodes, at = self.index(key).nodes, self.places[key].node
        lacking, bit, node = [], tier.bit, nodes[at]
        while at and not node.rows & bit:
            lacking.append(node.names)
            at = node.parent
            node = nodes[at]
        return tuple(itertools.chain.from_iterable(reversed(lacking)))

    def _passed(
        self, namespace: bytes, tokens: NDArray[Any], media: Sequence[Media], seen: View | None
    ) -> tuple[int, bytes] | None:
        """The deepest boundary of `tokens` that a view names and its key, if it is one of a prompt that begins so."""
        if seen is None or seen.prompt is None or media or not seen.prompt.begins(namespace, tokens):
            return None
        for boundary, _, key in reversed(seen.boundaries):
            if boundary <= len(tokens) and key is not None and key in self.places:
                return boundary, key
        return None

    def _with(
        self,
        *,
        indexes: Map[bytes, Index] | None = None,
        places: Map[bytes, Place] | None = None,
        media: MediaIds | None = None,
    ) -> Prompts:
        return Prompts(
            self.page,
            self.indexes if indexes is None else indexes,
            self.places if places is None else places,
            self.media if media is None else media,
        )


def _chain(namespace: bytes, tokens: Tokens, media: Sequence[Media], index: Index, match: Match) -> KeyChain:
    """The key of `tokens`, hashed from the last whole page that the index knows."""
    page = index.page
    for _, node in index.ancestors(match.ids[-1] if match.ids else 0):
        count = min(whole_pages(node.start, match.length, page), len(node.names))
        if count:
            chain = KeyChain.resume(node.names[count - 1], match.length // page * page, page)
            break
    else:
        chain = KeyChain.start(namespace, page)
    return chain.grown(
        tokens[chain.length :], [item for item in sorted(media) if item.position >= chain.length]
    )
