"""How long computing and loading take here, from what they took so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cache.plan import ResumePlan
from cache.tier import Tier

FADE = 0.95
"""What a measurement still counts when the next one comes."""
AGAIN = 10.0
"""Calls are tried again when those left out might have saved this many times what one takes."""


@dataclass(slots=True)
class Line:
    """Seconds of calls as a fixed part and a part that grows with their size, fitted to the last calls.

    `left_out` is the seconds that were computed in their place since the last of them.
    """

    count: float = 0.0
    sizes: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    left_out: float = 0.0

    def add(self, size: float, seconds: float) -> None:
        """One more call."""
        self.count = FADE * self.count + 1.0
        self.sizes = FADE * self.sizes + size
        self.seconds = FADE * self.seconds + seconds
        self.squares = FADE * self.squares + size * size
        self.products = FADE * self.products + size * seconds
        self.left_out = 0.0

    def leave_out(self, saves: float, takes: float) -> bool:
        """A call is left out that might save so many seconds of computing and is expected to take so many.

        Returns:
            False if it is too much by now: what was measured is old, and forgotten, so that a call is made.
        """
        self.left_out += saves
        if self.left_out < AGAIN * takes:
            return True
        self.count = self.sizes = self.seconds = self.squares = self.products = self.left_out = 0.0
        return False

    def at(self, size: float) -> float:
        """What a call of this size takes; 0 while nothing is known, so that it is tried."""
        if not self.count:
            return 0.0
        spread = self.count * self.squares - self.sizes**2
        slope = 0.0
        if spread > 1e-9 * self.squares * self.count:
            slope = max(0.0, (self.count * self.products - self.sizes * self.seconds) / spread)
        fixed = (self.seconds - slope * self.sizes) / self.count
        if fixed < 0:
            return size * self.seconds / self.sizes
        return fixed + slope * size


@dataclass(slots=True)
class Rates:
    """What is measured: prefills by their tokens, decoding by its rows, loads of each tier by their bytes, searches.

    Attributes:
        prefill: seconds of steps by the tokens of their prefills.
        decode: seconds of steps without any, by their rows.
        loads: seconds of loads by their bytes, for each tier.
        search: seconds of searches; their size is 1.
        state_nbytes, row_nbytes: bytes of a state, and of a token's latents.
    """

    state_nbytes: int = 0
    row_nbytes: int = 0
    prefill: Line = field(default_factory=Line)
    decode: Line = field(default_factory=Line)
    loads: dict[Tier, Line] = field(default_factory=lambda: {tier: Line() for tier in Tier})
    search: Line = field(default_factory=Line)

    def step(self, tokens: int, rows: int, seconds: float) -> None:
        """A step took so long, with so many tokens of prefills and rows that decode."""
        if tokens:
            self.prefill.add(
                float(tokens), max(0.0, seconds - self.decode.at(float(rows)) if rows else seconds)
            )
        elif rows:
            self.decode.add(float(rows), seconds)

    def beside(self, rows: int, grid: int, most: int) -> int:
        """Tokens of prefills, a multiple of `grid` and `most` at most, that take no longer than as many rows: who
        decodes waits twice as long for a token while a prompt is read, and not as long as a step can be."""
        tokens, patience = grid, self.decode.at(float(rows))
        while 2 * tokens <= most and 0.0 < self.prefill.at(2.0 * tokens) <= patience:
            tokens *= 2
        return tokens

    def seconds(self, plan: ResumePlan, num_tokens: int) -> float:
        """What a request takes up to its first token, if it starts by this plan: all its tiers are read at once."""
        load = max(self._loads(plan).values(), default=0.0)
        return load + self.compute(num_tokens - plan.boundary)

    def started(self, plan: ResumePlan, plans: Sequence[ResumePlan]) -> None:
        """A request started by one of its plans: a tier that is left out although another plan goes deeper with it is
        tried again by the rule of the searches."""
        mine, left_out = self._loads(plan), dict[Tier, tuple[float, float]]()
        for other in plans:
            saves = self.compute(max(0, other.boundary - plan.boundary))
            for tier, takes in self._loads(other).items():
                if tier not in mine and takes > saves:
                    left_out[tier] = max(left_out.get(tier, (0.0, 0.0)), (saves, takes))
        for tier, (saves, takes) in left_out.items():
            self.loads[tier].leave_out(saves, takes)

    def compute(self, tokens: int) -> float:
        """Seconds to compute so many tokens of a prompt: at the pace of the last prefills."""
        return tokens * self.prefill.seconds / self.prefill.sizes if self.prefill.sizes else 0.0

    def worth_searching(self, tokens: int) -> bool:
        """Whether to search, which may save the computing of so many tokens: where that is expected to pay, and now and
        then where it is not, as a store that was slow may be quick again."""
        if tokens <= 0:
            return False
        saves, takes = self.compute(tokens), self.search.at(1.0)
        if not self.prefill.count or takes < saves:
            return True
        return not self.search.leave_out(saves, takes)

    def _loads(self, plan: ResumePlan) -> dict[Tier, float]:
        """What reading a plan's parts takes, by tier."""
        nbytes: dict[Tier, int] = {}
        for start, stop, tier in plan.rows:
            nbytes[tier] = nbytes.get(tier, 0) + (stop - start) * self.row_nbytes
        if plan.state is not None:
            nbytes[plan.state] = nbytes.get(plan.state, 0) + self.state_nbytes
        return {
            tier: self.loads[tier].at(float(size)) for tier, size in nbytes.items() if tier is not Tier.DEVICE
        }
