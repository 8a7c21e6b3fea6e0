"""Operations that a call needs, by formula, so that a time can be given as a share of the machine's best."""

from __future__ import annotations

CHUNK = (
    16  # Whatever chunk an implementation takes, it is credited with the count for this one, the smallest.
)


def kda_flops_per_token_head(key_dim: int, value_dim: int, chunk: int = CHUNK) -> float:
    """Operations a token and head of chunked KDA, forward, causality exploited; a multiply-add is 2.

    `6 K V` (three products with the state), `C (3 K + 2 V)` (the two score matrices and what they multiply),
    `C^2 / 3` (the triangular inverse). One count for every implementation: one that does more work for the
    same result earns no credit.

    Source: "Kimi Linear" (arXiv:2510.26692), equation 13 (`6 d^2 + 3 C d + C^2`), written for K != V and
    lower triangles only.
    """
    return 6 * key_dim * value_dim + chunk * (3 * key_dim + 2 * value_dim) + chunk**2 / 3


def kda_flops(tokens: int, heads: int, key_dim: int, value_dim: int, *, backward: bool = False) -> float:
    """Operations of a call; with `backward`, of forward and backward: three forwards, nothing repeated."""
    return tokens * heads * kda_flops_per_token_head(key_dim, value_dim) * (3 if backward else 1)
