"""The boundaries section: what it costs to get states in the middle of a call out of the same call."""

from __future__ import annotations

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contest import Log
from benchmarks.inputs import Case, draw
from benchmarks.timing import Contender, race


def measure(case: Case, boundaries: tuple[int, ...], *, rounds: int, log: Log) -> dict[str, Any]:
    """Time one call with and without boundaries, in turn.

    Args:
        case: sizes and gate.
        boundaries: token counts, 0 to T.
        rounds: calls of each.
        log: told who is at work.

    Returns:
        A record: `without_*` and `with_*` times, and `cost_min`, `cost_median`, with over without.

    Raises:
        RuntimeError: the outputs with and without boundaries are not close: the two do not do the same work.
    """
    from pallas_kernels.kda import kda_prefill

    log(f"boundaries {case.gate} T={case.T}")
    inputs, counts = draw(case), jnp.asarray(boundaries, jnp.int32)
    plain = jax.jit(lambda *args: kda_prefill(*args, gate_lower_bound=case.lower_bound))
    marked = jax.jit(
        lambda counts, *args: kda_prefill(*args, boundaries=counts, gate_lower_bound=case.lower_bound)
    )
    arguments = inputs[:6]
    without, beside = plain(*arguments), marked(counts, *arguments)
    for name, reference, got in zip(("out", "state"), without, beside[:2], strict=True):
        if not np.allclose(np.asarray(reference), np.asarray(got), rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"{name} with boundaries {boundaries} differs from that without, for {case}")
    timings = race(
        [
            Contender(name="without", call=lambda _: jax.block_until_ready(plain(*arguments))),
            Contender(name="with", call=lambda _: jax.block_until_ready(marked(counts, *arguments))),
        ],
        rounds=rounds,
        budget_s=20.0,
        settle_s=0.001,
        warm=True,
    )
    pairs = zip(timings["with"].seconds, timings["without"].seconds, strict=False)
    return {
        "impl": "ours",
        **case.sizes(),
        "boundaries": list(boundaries),
        **timings["without"].figures("without"),
        **timings["with"].figures("with"),
        "cost_min": timings["with"].min_ms / timings["without"].min_ms,
        "cost_median": statistics.median(marked_s / plain_s for marked_s, plain_s in pairs),
    }
