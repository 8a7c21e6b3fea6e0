"""Changes to a few nodes of the prefix tree at once, inside one change of an index."""

from __future__ import annotations

from itertools import chain
from typing import TypeAlias

import numpy as np
from immutables import Map, MapMutation

from cache.node import Node, whole_pages
from cache.tier import Tier

Nodes: TypeAlias = MapMutation[int, Node]


def with_child(node: Node, child: Node, child_id: int) -> Node:
    """With a child in the place of what began with the same token."""
    return node._replace(children=node.children.set(int(child.edge[0]), child_id))


def split(nodes: Nodes, lower_id: int, stop: int, upper_id: int, page: int) -> int:
    """Cuts a node at `stop`. The lower half keeps id, boundary and children; the upper holds the pages that end in it,
    and no checkpoint."""
    lower = nodes[lower_id]
    count = whole_pages(lower.start, stop, page)
    users = tuple(int(bool(lower.rows & tier.bit)) for tier in Tier)
    nodes[upper_id] = Node(
        lower.parent,
        lower.start,
        stop,
        lower.edge[: stop - lower.start],
        Map({int(lower.edge[stop - lower.start]): lower_id}),
        lower.names[:count],
        lower.rows,
        users=(*users, int(lower.pinned)),
    )
    nodes[lower_id] = lower._replace(
        parent=upper_id, start=stop, edge=lower.edge[stop - lower.start :], names=lower.names[count:]
    )
    nodes[lower.parent] = with_child(nodes[lower.parent], nodes[upper_id], upper_id)
    return upper_id


def trim(nodes: Nodes, at: int, tier: Tier) -> tuple[bytes, ...]:
    """Takes rows from a node and those before it while nothing in the tier needs them; their names."""
    bit, freed, node = tier.bit, [], nodes[at]
    while at and not node.rows & bit:
        at = node.parent
        node = nodes[at]
    while at:
        if node.states & bit or node.users[tier] or node.pinned:
            break
        freed.append(node.names)
        nodes[at] = node.with_user(tier, 0, node.rows & ~bit)
        at = node.parent
        node = nodes[at].with_user(tier, -1)
    if freed:
        nodes[at] = node
    return tuple(chain.from_iterable(reversed(freed)))


def prune(nodes: Nodes, at: int) -> None:
    """Takes away a node that is no boundary and leads nowhere, then joins what is left in one piece."""
    node = nodes[at]
    while at and node.key is None and not node.children:
        del nodes[at]
        at = node.parent
        node = nodes[at]._replace(children=nodes[at].children.delete(int(node.edge[0])))
        nodes[at] = node
    join(nodes, at)


def join(nodes: Nodes, at: int) -> None:
    """Makes one node of a node that is no boundary and its only child, which keeps its id.

    They stay two while they differ in rows: where a pin behind both keeps pages of the first that nothing else needs.
    """
    node = nodes[at]
    if not at or node.key is not None or len(node.children) != 1:
        return
    (below,) = node.children.values()
    lower = nodes[below]
    if lower.rows != node.rows:
        return
    edge = np.concatenate([node.edge, lower.edge])
    edge.flags.writeable = False
    nodes[below] = lower._replace(
        parent=node.parent, start=node.start, edge=edge, names=node.names + lower.names
    )
    nodes[node.parent] = with_child(nodes[node.parent], nodes[below], below)
    del nodes[at]
