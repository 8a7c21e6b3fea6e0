"""The measure itself: what it lets through and what it does not."""

from __future__ import annotations

import numpy as np
import pytest

from measure import assert_close

ONES = np.ones((3, 4), np.float32)


def test_close_passes() -> None:
    assert_close("ones", ONES, ONES * np.float32(1 + 1e-4), 1.1e-4)
    assert_close("zeros", ONES * 0, ONES * 0, 1e-9)
    assert_close("empty", ONES[:0], ONES[:0], 1e-9)


@pytest.mark.parametrize(
    ("reference", "got", "text"),
    [
        (ONES, ONES * np.float32(1.01), "relative error 0.01"),
        (ONES, ONES[None], "shape"),
        (ONES, ONES * np.nan, "NaN in the result"),
        (ONES * np.nan, ONES * np.nan, "NaN in the reference"),
        (ONES * 0, ONES * 1e-9, "relative error inf"),
        (ONES, ONES * np.inf, "relative error inf"),
    ],
    ids=["far", "shape", "nan", "nan_twice", "zero_reference", "inf"],
)
def test_far_fails(reference: np.ndarray, got: np.ndarray, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        assert_close("ones", reference, got, 1e-3)
