"""The one measure of closeness that all tests use."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def relative_error(reference: ArrayLike, got: ArrayLike) -> float:
    """rms(got - reference) / rms(reference) in float64; inf for NaN or a wrong shape, 0 for two zeros."""
    want, have = (np.asarray(x).astype(np.float64) for x in (reference, got))
    if want.shape != have.shape or np.isnan(want).any() or np.isnan(have).any():
        return float("inf")
    error, size = (float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0 for x in (have - want, want))
    return error / size if size else (0.0 if error == 0.0 else float("inf"))


def assert_close(name: str, reference: ArrayLike, got: ArrayLike, ratio: float) -> None:
    """Fails unless shapes agree, neither holds NaN, and rms(got - reference) / rms(reference) < ratio.

    Args:
        name: what is compared; it opens the failure's text.
        reference: what is right.
        got: what is tested, any dtype.
        ratio: the bound, free of scale. A `reference` that is all zero must be met exactly.

    Raises:
        AssertionError: with the error, the bound and the largest difference.
    """
    want, have = (np.asarray(x).astype(np.float64) for x in (reference, got))
    assert want.shape == have.shape, f"{name}: shape {have.shape}, expected {want.shape}"
    for which, x in (("reference", want), ("result", have)):
        assert not np.isnan(x).any(), f"{name}: {int(np.isnan(x).sum())} of {x.size} NaN in the {which}"
    error = relative_error(want, have)
    largest = np.max(np.abs(have - want), initial=0.0)
    assert error < ratio, (
        f"{name}: relative error {error:.3g}, bound {ratio:.3g}, largest difference {largest:.3g}"
    )
