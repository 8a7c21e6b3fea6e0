"""A piece of the prefix tree, and the arithmetic of its pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from immutables import Map

from cache.tier import Tier
from cache.tokens import Tokens

PINNED = len(Tier)
"""Place of pins among a node's users, behind the tiers."""
NO_USERS = (0,) * (len(Tier) + 1)
SHORT = 8192
"""Tokens up to which it is quicker to ask first whether all bytes of two rows are the same."""


class Node(NamedTuple):
    """The tokens `[start, stop)` of every prompt that passes here.

    A page of latents belongs to the node that its last row lies in: a page that a fork cuts is then a page of each
    branch, and no page has two owners.

    Attributes:
        parent: id of the node before it; the root's is its own.
        start: tokens before the first of `edge`.
        stop: tokens up to the end of `edge`.
        edge: the tokens between.
        children: ids of the nodes behind it, by their first token.
        names: names of its pages, in order.
        rows: the tiers that hold its pages. A tier that holds a node's pages holds those of all nodes before it.
        states: the tiers that hold the checkpoint at `stop`.
        users: how many children have `rows` in each tier, and how many lead to something pinned.
        pins: how often the checkpoint at `stop` is pinned.
        key: names the boundary at `stop` while it is remembered, else None.
        last_use: time of the last request that resumed at `stop` or could have.
    """

    parent: int
    start: int
    stop: int
    edge: Tokens
    children: Map[int, int] = Map()
    names: tuple[bytes, ...] = ()
    rows: int = 0
    states: int = 0
    users: tuple[int, ...] = NO_USERS
    pins: int = 0
    key: bytes | None = None
    last_use: float = 0.0

    @property
    def pinned(self) -> bool:
        """Whether it or anything behind it is pinned."""
        return bool(self.pins or self.users[PINNED])

    def with_user(self, place: int, change: int, rows: int | None = None, states: int | None = None) -> Node:
        """With so many children more that have rows in a tier, or pins; and with other rows and states, if given."""
        users = self.users
        if change:
            users = (*users[:place], users[place] + change, *users[place + 1 :])
        return Node(  # as `_replace`, in half the time
            self.parent,
            self.start,
            self.stop,
            self.edge,
            self.children,
            self.names,
            self.rows if rows is None else rows,
            self.states if states is None else states,
            users,
            self.pins,
            self.key,
            self.last_use,
        )


def whole_pages(start: int, stop: int, page: int) -> int:
    """How many pages end in the tokens (start, stop]."""
    return stop // page - start // page


def common(a: Tokens, b: Tokens) -> int:
    """How many leading tokens two rows have in common."""
    if len(a) <= SHORT and a.tobytes() == b.tobytes():
        return len(a)
    count = min(len(a), len(b))
    differ = a[:count] != b[:count]
    first = int(differ.argmax()) if count else 0
    return first if count and differ[first] else count


ROOT = Node(0, 0, 0, np.empty(0, np.int32))
