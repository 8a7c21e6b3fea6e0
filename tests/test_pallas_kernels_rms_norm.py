"""Root-mean-square norms against float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from measure import assert_close
from pallas_kernels import rms_norm, rms_norm_gated

EPS = 1e-2  # large enough to be seen


def by_hand(x, weight, gate=None):
    x = x.astype(np.float64)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight
    return y if gate is None else y / (1 + np.exp(-gate.astype(np.float64)))


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32) for s in ((3, 5, 20), (3, 5, 20), (20,))]


@pytest.mark.parametrize(("dtype", "ratio"), [("float32", 2e-7), ("bfloat16", 3e-3)])
def test_matches_the_formula(arrays, dtype: str, ratio: float) -> None:
    x, gate, weight = (jnp.asarray(a, dtype) for a in arrays)
    plain, gated = rms_norm(x, weight, eps=EPS), rms_norm_gated(x, gate, weight, eps=EPS)
    assert plain.dtype == gated.dtype == dtype
    exact = [np.asarray(a, np.float32) for a in (x, gate, weight)]
    assert_close("plain", by_hand(exact[0], exact[2]), plain, ratio)
    assert_close("gated", by_hand(exact[0], exact[2], exact[1]), gated, ratio)


def test_gradients_match_float64(arrays) -> None:
    x, gate, weight = (jnp.asarray(a) for a in arrays)

    def loss(x, gate, weight):
        return (rms_norm_gated(x, gate, weight, eps=EPS) ** 3).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    got = gradient(x, gate, weight)
    with jax.enable_x64(True):
        exact = gradient(*(jnp.asarray(a, jnp.float64) for a in arrays))
        exact = [np.asarray(a) for a in exact]
    for name, reference, mine in zip(["dx", "dgate", "dweight"], exact, got):
        assert_close(name, reference, mine, 1e-6)


def test_says_what_is_wrong(arrays) -> None:
    x, gate, weight = (jnp.asarray(a) for a in arrays)
    with pytest.raises(ValueError, match="19"):
        rms_norm(x, weight[:19], eps=EPS)
    with pytest.raises(ValueError, match="gate"):
        rms_norm_gated(x, gate[:2], weight, eps=EPS)
