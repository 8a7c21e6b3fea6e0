"""The prefix index: which boundaries of which prompts are remembered, and which tiers hold their bytes.

A radix tree over token ids whose nodes lie in a persistent map, so that a change copies a few entries of the map
however many prompts there are, and every version stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from immutables import Map

from cache.node import PINNED, ROOT, Node, common, whole_pages
from cache.tier import Tier
from cache.tokens import Tokens
from cache.tree import Nodes, join, prune, split, trim, with_child

COPIED = 2**17
"""Tokens of a prompt up to which it is quicker to copy its bytes and compare these with each node's."""


class Match(NamedTuple):
    """How far an index knows a prompt.

    Attributes:
        length: tokens of the prompt that it knows.
        ids: the nodes they lie in, in order; the prompt may leave the last one before its end.
        nodes: the same.
        data: the prompt's bytes, where it was short enough to copy them.
    """

    length: int
    ids: tuple[int, ...]
    nodes: tuple[Node, ...]
    data: bytes = b""


class Index(NamedTuple):
    """An immutable value; changes give a new index that shares all that did not change.

    Attributes:
        page: latent rows a page.
        nodes: by id. A boundary's id stays its own until it is forgotten; 0 is the root.
        next_id: for the next node.
    """

    page: int
    nodes: Map[int, Node]
    next_id: int = 1

    @classmethod
    def empty(cls, page: int) -> Index:
        """An index that knows nothing.

        Raises:
            ValueError: if `page` is not positive.
        """
        if page < 1:
            raise ValueError(f"{page=} must be positive: it is how many latent rows move together")
        return cls(page, Map({0: ROOT}))

    def match(self, tokens: Tokens, after: int = 0) -> Match:
        """Follows a prompt from its first token, or from a boundary on that it is known to pass. Changes nothing."""
        nodes, node, num_tokens = self.nodes, self.nodes[after], len(tokens)
        data = tokens.tobytes() if num_tokens <= COPIED and not after else b""
        numbers = tokens.data
        at, ids, path = node.stop, [after] if after else [], [node] if after else []
        while at == node.stop and at < num_tokens:
            child = node.children.get(numbers[at])
            if child is None:
                break
            node = nodes[child]
            if data and data.startswith(node.edge.data, 4 * at):
                at = node.stop
            else:
                at += common(node.edge, tokens[at : node.stop])
            ids.append(child)
            path.append(node)
        return Match(at, tuple(ids), tuple(path), data)

    def insert(
        self, tokens: Tokens, key: bytes, names: Sequence[bytes], now: float, match: Match | None = None
    ) -> tuple[Index, int]:
        """Remembers the boundary behind `tokens`.

        Args:
            tokens: all of them, `[T]`.
            key: the boundary's name.
            names: of the last pages that end in `tokens`, at least those that the index does not know.
            now: becomes its last use.
            match: this index's own match of `tokens`, where the caller has it.

        Returns:
            The new index and the boundary's id.

        Raises:
            ValueError: without tokens, and with fewer names than new pages.
        """
        if not len(tokens):
            raise ValueError(
                "a boundary has tokens before it; what holds before the first token needs no checkpoint"
            )
        match = match or self.match(tokens)
        nodes = self.nodes.mutate()
        last, next_id = (match.ids[-1] if match.ids else 0), self.next_id
        if match.length < nodes[last].stop:
            last, next_id = split(nodes, last, match.length, next_id, self.page), next_id + 1
        if match.length < len(tokens):
            count = whole_pages(match.length, len(tokens), self.page)
            edge = tokens[match.length :].copy()
            edge.flags.writeable = False
            own = tuple(names[len(names) - count :])
            if len(own) != count:
                raise ValueError(f"{count} pages are new, got names of {len(names)}")
            nodes[next_id] = Node(last, match.length, len(tokens), edge, names=own)
            nodes[last] = with_child(nodes[last], nodes[next_id], next_id)
            last, next_id = next_id, next_id + 1
        nodes[last] = nodes[last]._replace(key=key, last_use=now)
        return Index(self.page, nodes.finish(), next_id), last

    def remove(self, boundary: int) -> Index:
        """Forgets a boundary that no tier holds and nobody pins, and the tokens that lead to nothing else.

        Raises:
            ValueError: if it is held or pinned.
        """
        node = self.nodes[boundary]
        if node.states or node.pins:
            raise ValueError(
                f"a boundary that is held ({node.states=}) or pinned ({node.pins=}) cannot be forgotten"
            )
        nodes = self.nodes.mutate()
        nodes[boundary] = node._replace(key=None)
        prune(nodes, boundary)
        return self._with(nodes)

    def hold(self, boundary: int, tier: Tier) -> Index:
        """A tier holds the checkpoint of a boundary and all pages before it."""
        nodes, bit, at = self.nodes.mutate(), tier.bit, boundary
        node, more, states = nodes[at], 0, nodes[at].states | bit
        while at and not node.rows & bit:
            nodes[at] = node.with_user(tier, more, node.rows | bit, states)
            at, more, states = node.parent, 1, None
            node = nodes[at]
        nodes[at] = node.with_user(tier, more, None, states)
        return self._with(nodes)

    def release(self, boundary: int, tier: Tier) -> tuple[Index, tuple[bytes, ...]]:
        """A tier holds the checkpoint of a boundary no longer, nor the pages that no checkpoint of this tier and
        nothing pinned lies behind.

        Returns:
            The new index and the names of the pages that the tier gives up.
        """
        nodes = self.nodes.mutate()
        node = nodes[boundary]
        nodes[boundary] = node.with_user(tier, 0, states=node.states & ~tier.bit)
        freed = trim(nodes, boundary, tier)
        return self._with(nodes), freed

    def strip(self, top: int, tier: Tier) -> tuple[Index, tuple[bytes, ...], tuple[bytes, ...]]:
        """A tier holds nothing any longer of a node and of all behind it, pinned or not.

        Returns:
            The new index, the keys of the checkpoints that the tier gives up, and the names of the pages.
        """
        nodes, left, keys, names = self.nodes.mutate(), [top], [], []
        if not nodes[top].rows & tier.bit:
            return self, (), ()
        while left:
            at = left.pop()
            node = nodes[at]
            if not node.rows & tier.bit:
                continue
            if node.states & tier.bit and node.key is not None:
                keys.append(node.key)
            names += node.names
            left += node.children.values()
            node = node._replace(rows=node.rows & ~tier.bit, states=node.states & ~tier.bit)
            nodes[at] = node.with_user(tier, -node.users[tier])
        above = nodes[top].parent
        nodes[above] = nodes[above].with_user(tier, -1)
        names += trim(nodes, above, tier)
        return self._with(nodes), tuple(keys), tuple(names)

    def pin(self, boundary: int) -> Index:
        """What a boundary needs stays where it is until it is unpinned as often."""
        nodes = self.nodes.mutate()
        at, change = boundary, nodes[boundary].pinned
        nodes[at] = nodes[at]._replace(pins=nodes[at].pins + 1)
        while at and not change:
            at = nodes[at].parent
            change = nodes[at].pinned
            nodes[at] = nodes[at].with_user(PINNED, 1)
        return self._with(nodes)

    def unpin(self, boundary: int) -> tuple[Index, tuple[tuple[Tier, tuple[bytes, ...]], ...]]:
        """Takes one pin back.

        Returns:
            The new index and, by tier, the names of the pages that only the pin had kept.

        Raises:
            ValueError: if there is none.
        """
        if not self.nodes[boundary].pins:
            raise ValueError("unpinned more often than pinned; a pin is given back once")
        nodes = self.nodes.mutate()
        at = boundary
        nodes[at] = nodes[at]._replace(pins=nodes[at].pins - 1)
        while at and not nodes[at].pinned:
            at = nodes[at].parent
            nodes[at] = nodes[at].with_user(PINNED, -1)
        freed = tuple((tier, trim(nodes, boundary, tier)) for tier in Tier)
        at = nodes[boundary].parent
        while at:
            above = nodes[at].parent
            join(nodes, at)
            at = above
        return self._with(nodes), tuple((tier, names) for tier, names in freed if names)

    def touch(self, boundary: int, now: float) -> Index:
        """A boundary was used."""
        nodes = self.nodes.set(boundary, self.nodes[boundary]._replace(last_use=now))
        return Index(self.page, nodes, self.next_id)

    def tokens(self, boundary: int) -> Tokens:
        """All tokens before a boundary."""
        edges = [node.edge for _, node in self.ancestors(boundary)]
        return np.concatenate(edges[::-1]) if edges else ROOT.edge

    def ancestors(self, boundary: int) -> Iterator[tuple[int, Node]]:
        """A boundary's node and those before it, up to the root and without it."""
        while boundary:
            node = self.nodes[boundary]
            yield boundary, node
            boundary = node.parent

    def parent(self, boundary: int) -> bytes | None:
        """Key of the deepest remembered boundary before this one."""
        nodes, at = self.nodes, self.nodes[boundary].parent
        while at:
            node = nodes[at]
            if node.key is not None:
                return node.key
            at = node.parent
        return None

    def children(self, boundary: int) -> tuple[bytes, ...]:
        """Keys of the remembered boundaries whose parent this one is, or would be."""
        found, left = [], list(self.nodes[boundary].children.values())
        while left:
            node = self.nodes[left.pop()]
            if node.key is None:
                left += node.children.values()
            else:
                found.append(node.key)
        return tuple(found)

    def _with(self, nodes: Nodes) -> Index:
        return Index(self.page, nodes.finish(), self.next_id)
