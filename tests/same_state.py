"""Whether two states of a model are the same to the bit."""

from __future__ import annotations

import jax
import numpy as np

from kda_jax.state import KDAState, MLAState, ModelState


def assert_same_state(want: ModelState, got: ModelState, rows: slice = slice(None)) -> None:
    """Bit-equal in everything alive: latents up to the position, and all else. `rows` of `want` are those of `got`."""
    want, got = jax.tree.map(np.asarray, (want, got))  # no program is compiled to cut latents
    for a, b in zip(want.layers, got.layers, strict=True):
        position = a.position[rows]
        np.testing.assert_array_equal(position, b.position)
        if isinstance(a, KDAState):
            assert isinstance(b, KDAState)
            np.testing.assert_array_equal(a.recurrent[rows], b.recurrent)
            np.testing.assert_array_equal(a.conv[rows], b.conv)
        else:
            assert isinstance(b, MLAState)
            for row, count in enumerate(position):
                np.testing.assert_array_equal(a.latent[rows][row, :count], b.latent[row, :count])
