"""How much of the prompts was restored, and how much computed, over the last minutes."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from kda_jax.server.keys import Tenant

SPAN_S = 5
SPANS = 120


class History:
    """Counts of prompt tokens by tenant, in spans of some seconds; old spans are forgotten."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, dict[str, Counter[str]]]] = deque(maxlen=SPANS)

    def add(self, tenant: Tenant, prompt_tokens: int, restored: Mapping[str, int], generated: int) -> None:
        """Counts a request that ended; `restored` are tokens of its prompt by the tier that they came from."""
        now = _span()
        if not self._spans or self._spans[-1][0] != now:
            self._spans.append((now, {}))
        counts = self._spans[-1][1].setdefault(tenant.name, Counter())
        computed = prompt_tokens - sum(restored.values())
        counts.update({**restored, "computed": computed, "generated": generated})

    def rows(self, tenant: Tenant) -> list[dict[str, Any]]:
        """What a tenant may see: a span's beginning, seconds since 1970, and the tokens by where they came from."""
        rows, oldest = [], _span() - SPAN_S * (SPANS - 1)
        while self._spans and self._spans[0][0] < oldest:
            self._spans.popleft()
        for start, by_tenant in self._spans:
            seen = [counts for name, counts in by_tenant.items() if tenant.operator or name == tenant.name]
            if seen:
                rows.append({"time": start, "tokens": dict(sum(seen, Counter()))})
        return rows


def _span() -> int:
    """The beginning of this span, seconds since 1970."""
    return int(time.time()) // SPAN_S * SPAN_S
