"""What stores of objects hold of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic

from cache import Rows, Seen, Tier, View
from cache.tiers import page_name
from cache.tokens import Tokens
from cache.view import merge
from kda_jax.engine.prompt_keys import PromptKeys
from transfer import Objects, find


def search(
    stores: Mapping[Tier, Objects],
    namespace: bytes,
    tokens: Tokens,
    page: int,
    timeout: float,
    found: Callable[[Tier, tuple[str, ...], tuple[str, ...]], None] = lambda tier, there, gone: None,
) -> View | None:
    """Asks every store for the checkpoints and the pages of a prompt, one store after another.

    Args:
        stores: of objects, by tier.
        namespace: the prompt's.
        tokens: the prompt.
        page: rows a page.
        timeout: seconds for all of it; a store that is late has nothing.
        found: told for each store what is there and what is not, by name.

    Returns:
        Where its checkpoints and its latents are; None if nothing is.
    """
    keys, until, views = PromptKeys(namespace, page, tokens), monotonic() + timeout, []
    for tier, objects in stores.items():
        left = until - monotonic()
        if left <= 0:
            break
        checkpoints = find(objects, keys.name, len(tokens) - 1, left)
        boundaries = checkpoints.boundaries
        left = until - monotonic()
        if left <= 0 or not keys.pages:
            held = [False] * len(keys.pages)
        else:
            names = [page_name(name) for name in keys.pages]
            held = objects.contains(names, left)
            there = [*map(keys.name, boundaries), *(name for name, is_there in zip(names, held) if is_there)]
            gone = [name for name, is_there in zip(names, held) if not is_there]
            found(tier, tuple(there), (*map(keys.name, checkpoints.gone), *gone))
        rows = tuple(
            Rows(at * page, (at + 1) * page, tier.bit) for at, is_there in enumerate(held) if is_there
        )
        seen = tuple(Seen(boundary, tier.bit) for boundary in sorted(boundaries))
        if rows or seen:
            views.append(View(0, rows, seen))
    if not views:
        return None
    first, *others = views
    for other in others:
        first = merge(first, other)
    return merge(first, View())  # rows that touch as one
