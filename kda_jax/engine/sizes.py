"""What a scheduler keeps to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a scheduler keeps to, checked.

    Attributes:
        rows: latent rows a page; the store's pages are as long.
        state_pages: pages that a snapshot of a state takes, with the rows of an unfinished page.
        budget: tokens that are computed in a step.
        grid: tokens between the places where a prefill may be cut.
        snapshots: most checkpoints that a chunk makes.
        queued: most tokens that wait.
        drafts: most guesses behind a row's token; 0 for none.

    Raises:
        ValueError: for values that are not positive (but no drafts), and for a budget below the grid.
    """

    rows: int
    state_pages: int
    budget: int = 2048
    grid: int = 64
    snapshots: int = 4
    queued: int = 1_000_000
    drafts: int = 0

    def __post_init__(self) -> None:
        values = (
            self.rows,
            self.state_pages,
            self.budget,
            self.grid,
            self.snapshots,
            self.queued,
            self.drafts + 1,
        )
        if min(values) < 1 or self.budget < self.grid:
            raise ValueError(f"sizes are positive and a budget is at least a step of the grid, got {self}")
