"""What is timed on a GPU: our kernels beside fla's, on the same numbers, as shares of what the device can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contest import disagreement
from benchmarks.on_device.clock import Call, time_calls
from benchmarks.on_device.fla_triton import Fla
from benchmarks.timing import speedup
from benchmarks.work import kda_flops
from pallas_kernels import kda_prefill, kda_step

OURS = "kda-jax"
AGREES = 2e-2
"""Both compute in bfloat16, each with its own rounding; who is further away computes something else."""


class Size(NamedTuple):
    """How much one race is about: a prefill of `tokens`, or a step of `rows`."""

    tokens: int
    rows: int
    heads: int = 32
    keys: int = 128
    values: int = 128


FULL = (Size(2048, 16), Size(8192, 64))
LITTLE = (Size(64, 2, heads=2, keys=32, values=32),)


class Race(NamedTuple):
    """One act at one size.

    Attributes:
        act: "forward", "both" (forward and backward) or "step".
        size: how much.
        calls: who takes part, by name; ours first.
        results: each one's outputs, to be compared with ours; of `both` the gradients.
        nbytes: inputs and outputs together.
        flops: by the count that all implementations are credited with.
    """

    act: str
    size: Size
    calls: dict[str, Call]
    results: dict[str, list[np.ndarray]]
    nbytes: int
    flops: float


def races(size: Size, implementation: str, fla: Fla | None) -> Iterator[Race]:
    """The acts of a size, one at a time: each holds its arrays only while it runs."""
    for act in (_forward, _both, _step):
        yield act(size, implementation, fla)


def run(race: Race, *, rounds: int, rates: dict[str, float] | None) -> list[dict[str, Any]]:
    """Times a race.

    Args:
        race: who and what.
        rounds: samples of each.
        rates: the device's, from `yardsticks.measure`; None leaves the shares out.

    Returns:
        A record each: `impl`, `act`, sizes, `ms` (minimum), `median_ms`, its shares of the device's rates, how many
        times faster ours is, and `error` against ours; `wrong` says who was not timed, and why.
    """
    ours = race.results[OURS]
    names = tuple(f"result {i}" for i in range(len(ours)))
    errors = {
        name: max(disagreement(names, tuple(ours), tuple(results)).values())
        for name, results in race.results.items()
    }
    taking_part = {name: call for name, call in race.calls.items() if errors[name] < AGREES}
    timings = time_calls(taking_part, rounds=rounds)
    records = []
    for name in race.calls:
        record: dict[str, Any] = {
            "impl": name, "act": race.act, **race.size._asdict(), "error": errors[name], "wrong": None
        }  # fmt: skip
        if name not in timings:
            records.append(record | {"wrong": f"differs from ours by {errors[name]:.1e}"})
            continue
        timing = timings[name]
        seconds = timing.median_ms / 1e3
        record |= {"ms": timing.min_ms, "median_ms": timing.median_ms, "samples": timing.rounds}
        if rates is not None:
            record["copy_share"] = race.nbytes / seconds / rates["copy_bytes_per_s"]
            record["matmul_share"] = race.flops / seconds / rates["matmul_flops_per_s"]
        if name != OURS:
            record["speedup_of_ours"] = speedup(timings[OURS], timing)
        records.append(record)
    return records


def draw(size: Size, rows: tuple[int, ...], seed: int = 0) -> tuple[jax.Array, ...]:
    """q, k, v in bfloat16, g and beta in float32 for `rows` of tokens, and a float32 state a row."""
    keys = jax.random.split(jax.random.key(seed), 6)
    q, k, v, z, write, state = (
        jax.random.normal(key, shape, jnp.float32)
        for key, shape in zip(
            keys,
            (
                *(
                    (*rows, size.heads, channels)
                    for channels in (size.keys, size.keys, size.values, size.keys)
                ),
                (*rows, size.heads),
                (rows[0], size.heads, size.keys, size.values),
            ),
        )
    )
    half = (x.astype(jnp.bfloat16) for x in (q, k, v))
    return (*half, -0.1 * jax.nn.softplus(z), jax.nn.sigmoid(write), 0.1 * state)


def _nbytes(*trees: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))


def _host(results: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(results)]


def _race(
    act: str,
    size: Size,
    arrays: tuple[jax.Array, ...],
    flops: float,
    ours: Callable[..., Any],
    peer: Callable[[Fla], Call],
    fla: Fla | None,
) -> Race:
    program = jax.jit(ours)
    made = program(*arrays)
    calls = {OURS: Call(lambda: program(*arrays), jax.block_until_ready)}
    results = {OURS: _host(made)}
    if fla is not None:
        calls["fla"] = peer(fla)
        results["fla"] = fla.restore(calls["fla"].enqueue())
    return Race(act, size, calls, results, _nbytes(arrays, made), flops)


def _forward(size: Size, implementation: str, fla: Fla | None) -> Race:
    arrays = draw(size, (1, size.tokens))
    flops = kda_flops(size.tokens, size.heads, size.keys, size.values)

    def ours(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
        return kda_prefill(q, k, v, g, beta, state, qk_l2norm=True, implementation=implementation)

    return _race("forward", size, arrays, flops, ours, lambda fla: fla.forward(arrays), fla)


def _both(size: Size, implementation: str, fla: Fla | None) -> Race:
    arrays = draw(size, (1, size.tokens))
    weight = draw(size, (1, size.tokens), seed=1)[2]
    flops = kda_flops(size.tokens, size.heads, size.keys, size.values, backward=True)

    def ours(*x: jax.Array) -> Any:
        def forward(q: Any, k: Any, v: Any, g: Any, beta: Any) -> jax.Array:
            return kda_prefill(q, k, v, g, beta, arrays[5], qk_l2norm=True, implementation=implementation)[0]

        return jax.vjp(forward, *x[:5])[1](weight)

    return _race("both", size, arrays, flops, ours, lambda fla: fla.both(arrays, weight), fla)


def _step(size: Size, implementation: str, fla: Fla | None) -> Race:
    *rows, state = draw(size, (size.rows, 1))
    arrays = (*(x[:, 0] for x in rows), state)
    flops = 7.0 * size.rows * size.heads * size.keys * size.values

    def ours(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
        return kda_step(q, k, v, g, beta, state, qk_l2norm=True, implementation=implementation)

    race = _race("step", size, arrays, flops, ours, lambda fla: fla.step(arrays), fla)
    # A step owns its state: the next call takes what this one returned, and nothing is copied.
    owned = jax.jit(ours, donate_argnums=5)
    held = [jnp.array(state)]

    def enqueue() -> Any:
        out, held[0] = owned(*arrays[:5], held[0])
        return out

    return race._replace(calls={**race.calls, OURS: Call(enqueue, jax.block_until_ready)})
