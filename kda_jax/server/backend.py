"""What a server asks of the engine behind it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from kda_jax.engine import Explanation, Statistics, Stream, TreeNode
from kda_jax.sampling import Sampler


@runtime_checkable
class Backend(Protocol):
    """The calls of `kda_jax.engine.Engine` that a server makes, which a test may answer in its place."""

    @property
    def closed(self) -> str | None: ...

    def submit(
        self,
        tokens: np.ndarray,
        *,
        max_new_tokens: int,
        sampler: Sampler = ...,
        seed: int = ...,
        timeout: float | None = ...,
        tenant: str = ...,
        logprobs: int = ...,
    ) -> Stream: ...

    def explain(self, tokens: np.ndarray, *, tenant: str = ...) -> Explanation: ...

    def statistics(self) -> Statistics: ...

    def tree(self, most: int = ..., *, tenant: str | None = ...) -> list[TreeNode]: ...

    def drain(self, timeout: float) -> bool: ...
