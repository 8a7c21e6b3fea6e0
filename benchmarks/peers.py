"""Who takes part in the operator benchmark, ours first; who is absent says so when asked to prepare."""

from __future__ import annotations

import jax.numpy as jnp

from benchmarks.contestant import Contestant
from benchmarks.jax_contestants import JaxContestant, load_deltanet, load_ours, load_scan, load_tokamax
from benchmarks.torch_contestants import TorchContestant

OURS: Contestant = JaxContestant(name="ours", package="kda-jax", load=lambda: load_ours(raw_gate=False))
OURS_WITH_GATE: Contestant = JaxContestant(
    name="ours_with_gate", package="kda-jax", load=lambda: load_ours(raw_gate=True), raw_gate=True
)
PEERS: tuple[Contestant, ...] = (
    JaxContestant(name="lax.scan", package="jax", load=load_scan, keeps_states=2),
    TorchContestant(name="fla-core.naive_recurrent_kda", function="naive_recurrent_kda", keeps_states=3),
    TorchContestant(name="fla-core.naive_chunk_kda", function="naive_chunk_kda", chunk=64),
    JaxContestant(
        name="tokamax",
        package="tokamax",
        load=load_tokamax,
        raw_gate=True,
        rows_in=lambda x: jnp.moveaxis(x, 2, 0),
        rows_out=lambda x: jnp.moveaxis(x, 0, 2),
        state_in=lambda x: x[:, None],
        state_out=lambda x: x[:, 0],
    ),
    JaxContestant(name="deltanet-tpu", package="deltanet-tpu", load=load_deltanet),
)
