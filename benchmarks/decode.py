"""The decode section: one token at a time, many tokens a dispatch, the state donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contest import TOLERANCE, Log, Outcome, disagreement, reason, verdict
from benchmarks.contestant import Absent, quiet
from benchmarks.inputs import Case, Inputs, draw
from benchmarks.machine import package_version
from benchmarks.timing import Contender, race, speedup

TOKENS = 16
Step = Callable[..., tuple[jax.Array, jax.Array]]
Program = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def our_step() -> Step:
    """Our `kda_step`."""
    from pallas_kernels.kda import kda_step

    return kda_step


def plain_step() -> Step:
    """One token as three einsums."""

    def step(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[jax.Array, jax.Array]:
        state = state * jnp.exp(g)[..., None]
        error = v - jnp.einsum("bhk,bhkv->bhv", k, state)
        state = state + jnp.einsum("bhk,bhv->bhkv", beta[..., None] * k, error)
        return jnp.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, state), state

    return step


def deltanet_step() -> Step:
    """deltanet-tpu's decode step, pure JAX on every device."""
    try:
        from deltanet_tpu import kda_decode_step  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Absent(f"deltanet-tpu is not installed ({error})") from error

    return kda_decode_step


# name -> (package, what loads the step), ours first
STEPS: dict[str, tuple[str, Callable[[], Step]]] = {
    "ours": ("kda-jax", our_step),
    "lax.scan": ("jax", plain_step),
    "deltanet-tpu": ("deltanet-tpu", deltanet_step),
}


def compile_steps(step: Step, inputs: Inputs) -> Program:
    """A program that runs `TOKENS` steps in one dispatch; it donates the state it is given."""
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in inputs[:5])

    def body(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        out, state = step(*token, state)
        return state, out

    def run(state: jax.Array, tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        state, out = jax.lax.scan(body, state, tokens)
        return out, state

    program = jax.jit(run, donate_argnums=0)
    return lambda state: jax.block_until_ready(program(state, tokens))


def measure(batch: int, *, sizes: dict[str, int], rounds: int, log: Log) -> Outcome:
    """Time `TOKENS` decode steps at one batch size; every peer's outputs and state agree with ours first.

    Args:
        batch: rows.
        sizes: `H`, `K`, `V`.
        rounds: timed calls of each.
        log: told who is at work.

    Returns:
        Records with `us_per_token` (the minimum) and `us_per_token_median`: one step of the whole batch.
    """
    case = Case(gate="bounded", T=TOKENS, B=batch, **sizes)
    inputs, outcome = draw(case), Outcome()
    programs: dict[str, Program] = {}
    errors: dict[str, dict[str, float]] = {}
    ours: tuple[np.ndarray, ...] = ()
    for name, (_, load) in STEPS.items():
        log(f"decode {name}")
        try:
            with quiet():
                program = compile_steps(load(), inputs)
                got = tuple(np.asarray(x) for x in program(jnp.copy(inputs.state)))
        except Absent as error:
            outcome.absent[name] = str(error)
            continue
        except Exception as error:
            if name == "ours":
                raise
            outcome.refused.append({"impl": name, **case.sizes(), "pass": "decode", "reason": reason(error)})
            continue
        ours = got if name == "ours" else ours
        errors[name] = disagreement(("out", "state"), ours, got)
        if (wrong := verdict(errors[name], TOLERANCE["forward"])) is not None:
            outcome.refused.append({"impl": name, **case.sizes(), "pass": "decode", "reason": wrong})
            continue
        programs[name] = program

    contenders = [
        Contender(
            name=name,
            call=lambda state, program=program: program(state),
            prepare=lambda: jax.block_until_ready(jnp.copy(inputs.state)),
        )
        for name, program in programs.items()
    ]
    with quiet():
        timings = race(contenders, rounds=rounds, budget_s=10.0, warm=True, settle_s=0.001)
    for name, timing in timings.items():
        package = STEPS[name][0]
        record = {"impl": name, "package": package, "version": package_version(package), **case.sizes()}
        record |= {
            "us_per_token": 1e3 * timing.min_ms / TOKENS,
            "us_per_token_median": 1e3 * timing.median_ms / TOKENS,
            "rounds": timing.rounds,
        }
        if name != "ours":
            record |= {"speedup_of_ours": speedup(timings["ours"], timing), "errors": errors[name]}
        outcome.results.append(record)
    return outcome
