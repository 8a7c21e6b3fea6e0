"""Which boundaries of which prompts are remembered, over all namespaces, and how to find one by its key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from immutables import Map
from numpy.typing import ArrayLike

from cache.index import Index, Match
from cache.keys import KeyChain
from cache.node import Node, whole_pages
from cache.retention.protocol import Kind
from cache.tier import Tier
from cache.tokens import Media, MediaIds, Tokens, as_tokens, check_media


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
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
        self, namespace: bytes, tokens: ArrayLike, media: Sequence[Media], kind: Kind, now: float
    ) -> tuple[Prompts, bytes]:
        """With the boundary behind `tokens`, and its key."""
        tokens = as_tokens(tokens)
        known = self._with(media=self.media.know(check_media(media, len(tokens)))) if media else self
        index, folded, match = known.find(namespace, tokens, media)
        chain = _chain(namespace, tokens, media, match, self.page)
        if chain.key in self.places:
            return self, chain.key
        index, node = index.insert(folded, chain.key, chain.added, now, match)
        parent = index.parent(node)
        above = self.places[parent] if parent is not None else None
        turn = above.turn + (above.kind is Kind.PROMPT_END) if above else 0
        places = self.places.set(chain.key, Place(namespace, node, kind, turn))
        return known._with(indexes=self.indexes.set(namespace, index), places=places), chain.key

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
        path = (node for _, node in self.index(key).ancestors(self.places[key].node))
        lacking = [node.names for node in takewhile(lambda node: not node.rows & tier.bit, path)]
        return tuple(name for names in reversed(lacking) for name in names)

    def _with(
        self,
        *,
        indexes: Map[bytes, Index] | None = None,
        places: Map[bytes, Place] | None = None,
        media: MediaIds | None = None,
    ) -> Prompts:
        return Prompts(
            page=self.page,
            indexes=self.indexes if indexes is None else indexes,
            places=self.places if places is None else places,
            media=self.media if media is None else media,
        )


def _chain(namespace: bytes, tokens: Tokens, media: Sequence[Media], match: Match, page: int) -> KeyChain:
    """The key of `tokens`, hashed from the last whole page that the index knows."""
    for node in reversed(match.nodes):
        count = min(whole_pages(node.start, match.length, page), len(node.names))
        if count:
            chain = KeyChain.resume(node.names[count - 1], match.length // page * page, page)
            break
    else:
        chain = KeyChain.start(namespace, page)
    return chain.extend(tokens[chain.length :], [item for item in media if item.position >= chain.length])
