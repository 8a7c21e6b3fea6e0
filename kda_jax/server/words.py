"""An explanation in words."""

from __future__ import annotations

from kda_jax.engine import Explanation, Limit

_WHY = {
    "no checkpoint": "up to {boundary} tokens there are latents but no checkpoint; who passes next makes one",
    "no latents": "at {boundary} tokens there is a checkpoint, and latents before it are gone",
    "evicted": "the checkpoint at {boundary} tokens was evicted",
    "other namespace": "up to {boundary} tokens are known in another namespace: of another tenant, or other weights",
    "parts here": "behind {boundary} tokens nothing like it was there before",
    "last token": "the checkpoint at {boundary} tokens is not below the last token, which is always computed",
}


def of(found: Explanation) -> list[str]:
    """Where a prompt would resume, then a line for each thing that limits it."""
    tiers = ", ".join(f"{count} from {tier}" for tier, count in found.latents.items())
    if found.boundary:
        first = (
            f"{found.boundary} of {found.tokens} tokens would be restored ({tiers}; state from {found.state})"
        )
    else:
        first = f"none of {found.tokens} tokens would be restored"
    return [first, *map(_limit, found.limits)]


def _limit(limit: Limit) -> str:
    text = _WHY.get(limit.why, limit.why + " at {boundary} tokens").format(boundary=limit.boundary)
    return text if limit.seconds is None else f"{text} {limit.seconds:.0f} s ago"
