"""Why a prompt resumes where it does, and the prefix tree as plain values."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from cache.plan import Limits, ResumePlan
from cache.store import Store
from cache.tier import Tier
from cache.tiers import page_name, state_name
from cache.tokens import Tokens
from cache.view import View


class Limit(NamedTuple):
    """What keeps a prompt from resuming deeper.

    Attributes:
        boundary: tokens that would not be computed, were it not for this.
        why: `no checkpoint`, `no latents`, `evicted`, `other namespace`, `parts here` or `last token`.
        seconds: since that was seen, where `why` is `evicted`, a few after it happened; None where it is not known.
    """

    boundary: int
    why: str
    seconds: float | None = None


class Explanation(NamedTuple):
    """Where a prompt would resume now.

    Attributes:
        tokens: its length.
        boundary: tokens that would not be computed.
        state: the tier that the checkpoint would come from; None for a cold start.
        latents: tokens of latents that would come from each tier.
        known: tokens that it shares with what was there before.
        limits: what keeps it from resuming deeper, shallow to deep.
    """

    tokens: int
    boundary: int
    state: str | None
    latents: Mapping[str, int]
    known: int
    limits: tuple[Limit, ...]


class TreeNode(NamedTuple):
    """A piece of the prefix tree: the tokens `[start, stop)` of every prompt that passes.

    Attributes:
        id, parent: numbers within the namespace; the root is 0 and is left out.
        namespace: the first digits of its digest.
        start, stop: tokens before it, and up to its end.
        boundary: whether a boundary is remembered at its end.
        kind: why that was made.
        states: tiers that hold its checkpoint; of stores of objects, those that are known to.
        rows: tiers that hold its latents, likewise.
        pins: how often it is pinned.
        idle: seconds since it was used last.
    """

    id: int
    parent: int
    namespace: str
    start: int
    stop: int
    boundary: bool
    kind: str | None
    states: tuple[str, ...]
    rows: tuple[str, ...]
    pins: int
    idle: float


def name(tier: Tier) -> str:
    """A tier's name, in small letters."""
    return tier.name.lower()


def by_tier(plan: ResumePlan) -> dict[str, int]:
    """Tokens that a plan restores, by the tier of their latents; rows of an unfinished page come with the state."""
    tokens: dict[str, int] = {}
    for start, stop, tier in plan.rows:
        tokens[name(tier)] = tokens.get(name(tier), 0) + stop - start
    rest = plan.boundary - sum(tokens.values())
    if plan.state is not None and rest:
        tokens[name(plan.state)] = tokens.get(name(plan.state), 0) + rest
    return tokens


def explain(
    store: Store,
    namespace: bytes,
    tokens: Tokens,
    remote: View | None,
    evicted: Mapping[bytes, float],
    now: float,
    *,
    others: bool,
) -> Explanation:
    """Explains a prompt.

    Args:
        store: what is held here.
        namespace: the prompt's.
        tokens: the prompt.
        remote: what stores of objects were found to hold of it.
        evicted: when boundaries were evicted, by key.
        now: on the same clock.
        others: whether to look into other namespaces, which tells what is in them.
    """
    seen = store.match(namespace, tokens)
    plan = store.plan(seen, len(tokens), Limits(), remote)
    limits = []
    if plan.latent_hit > plan.boundary:
        limits.append(Limit(plan.latent_hit, "no checkpoint"))
    if plan.state_hit > plan.boundary:
        limits.append(Limit(plan.state_hit, "no latents"))
    for boundary, tiers, key in seen.boundaries:
        if plan.boundary < boundary < len(tokens) and not tiers:
            at = evicted.get(key) if key is not None else None
            limits.append(Limit(boundary, "evicted", None if at is None else now - at))
    if others:
        for other in store.prompts.indexes:
            elsewhere = store.match(other, tokens).length if other != namespace else 0
            if elsewhere > max(seen.length, plan.boundary):
                limits.append(Limit(min(elsewhere, len(tokens) - 1), "other namespace"))
    known = max(seen.length, plan.latent_hit, plan.boundary)
    if plan.held:
        limits.append(Limit(plan.held[-1], "last token"))
    elif known < len(tokens):
        limits.append(Limit(known, "parts here"))
    state = None if plan.state is None else name(plan.state)
    return Explanation(
        len(tokens),
        plan.boundary,
        state,
        by_tier(plan),
        known,
        tuple(sorted(limits, key=lambda limit: limit[:2])),
    )


def tree(
    store: Store,
    most: int,
    now: float,
    namespace: bytes | None = None,
    elsewhere: Mapping[Tier, Container[str]] | None = None,
) -> list[TreeNode]:
    """The first nodes of the prefix tree, shallow to deep.

    Args:
        store: what is held here.
        most: nodes.
        now: on the store's clock.
        namespace: whose tree; every namespace's without one.
        elsewhere: names of the checkpoints and pages that stores of objects are known to hold.
    """
    names = sorted(store.prompts.indexes) if namespace is None else [namespace]
    walks = [_walk(store, name, now, elsewhere or {}) for name in names if name in store.prompts.indexes]
    found: list[TreeNode] = []
    while walks and len(found) < most:  # a node of each in turn, so that none hides the others
        for walk in list(walks):
            node = next(walk, None)
            if node is None:
                walks.remove(walk)
            elif len(found) < most:
                found.append(node)
    return found


def _walk(
    store: Store, namespace: bytes, now: float, elsewhere: Mapping[Tier, Container[str]]
) -> Iterator[TreeNode]:
    nodes = store.prompts.indexes[namespace].nodes
    left = deque(sorted(nodes[0].children.values()))
    while left:
        at = left.popleft()
        node = nodes[at]
        left += sorted(node.children.values())
        kind = None if node.key is None else store.prompts.places[node.key].kind.value
        pages = [page_name(page) for page in node.names]
        states = {tier for tier in Tier if node.states & tier.bit}
        rows = {tier for tier in Tier if node.rows & tier.bit}
        for tier, names in elsewhere.items():
            if node.key is not None and state_name(node.key) in names:
                states.add(tier)
            if all(page in names for page in pages) if pages else tier in states:
                rows.add(tier)  # rows of an unfinished page come with the state
        yield TreeNode(
            at,
            node.parent,
            namespace.hex()[:8],
            node.start,
            node.stop,
            node.key is not None,
            kind,
            tuple(map(name, sorted(states))),
            tuple(map(name, sorted(rows))),
            node.pins,
            now - node.last_use,
        )
