"""`python -m pallas_kernels check`: what it reads from the assembler, what it counts, and how it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from pallas_kernels.__main__ import app
from pallas_kernels.check import command
from pallas_kernels.check.cases import cases
from pallas_kernels.check.targets import TARGETS
from pallas_kernels.check.toolchain import Compiled, Missing, Toolchain, parse
from pallas_kernels.kda.triton.backward.cost import (
    contract_cost,
    pull_back_cost,
    retreat_cost,
    states_cost,
)
from pallas_kernels.kda.triton.cost import intra_cost, state_cost, step_cost
from pallas_kernels.kda.triton.tile import Plan
from pallas_kernels.shapes import SHAPES

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kda_intra' for 'sm_90a'
ptxas info    : Function properties for kda_intra
    8 bytes stack frame, 272 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Compiling entry function 'loop_add_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_add_fusion
    8 bytes stack frame, 16 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers
ptxas info    : Compiling entry function 'kda_intra' for 'sm_90a'
ptxas info    : Function properties for kda_intra
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 170 registers
"""


def test_the_last_word_of_the_assembler_counts() -> None:
    assert parse(LOG) == {"kda_intra": Compiled(170, 0), "loop_add_fusion": Compiled(12, 16)}
    assert parse("") == {}


def test_bytes_of_a_forward_are_those_of_its_arrays() -> None:
    half, single = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    tokens = 8192 * 32

    def per_token(decays: jnp.dtype, **prelude: Any) -> tuple[float, float]:
        plan = Plan(8192, 32, 128, 128, work=half, **prelude)
        costs = intra_cost(plan, 128, half, decays), state_cost(plan, 128, 0, 0, half)
        intra, state = (cost.bytes_accessed / tokens for cost in costs)
        return intra, state

    # q, k; log decays; beta; (I + A)^-1 in float32 and Aqk in bfloat16; kw, qe, ke; decay
    # v, out; beta; the same matrices
    squares = 160 + 80
    given = per_token(single)
    assert given == (2 * 256 + 512 + 4 + squares + 3 * 256 + 8, 2 * 256 + 4 + squares + 3 * 256 + 8)
    # L2 norm and gate inside: raw projections in half precision, both squares in float16
    squares = 80 + 80
    inside = per_token(half, qk_l2norm=True, gated=True)
    assert inside == (2 * 256 + 256 + 4 + squares + 3 * 256 + 8, 2 * 256 + 4 + squares + 3 * 256 + 8)
    assert (sum(given), sum(inside)) == (3576, 3160)  # inputs and outputs alone are 1540 and 1284
    shared = per_token(half, qk_l2norm=True, gated=True, repeats=4)
    assert shared == (inside[0] - 2 * 192, inside[1])  # four value heads read a query and key head once
    assert step_cost(1, 1, 128, 128).bytes_accessed == 2 * 4 * 128**2 + 4 * (3 * 128 + 2 * 128 + 1)


def test_bytes_of_a_backward_are_those_of_its_arrays() -> None:
    half, wide = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    plan = Plan(8192, 32, 128, 128, work=half, ends=wide)
    tokens, state = 8192 * 32, 4 * 128 * 128 // 64
    per_token = {
        "intra": intra_cost(plan, 128, half, wide).bytes_accessed / tokens,
        "states": states_cost(plan, 128, 0, half).bytes_accessed / tokens,
        "retreat": retreat_cost(plan, 128, 0, half).bytes_accessed / tokens,
        "contract": contract_cost(plan, 128, half).bytes_accessed / tokens,
        "pull_back": pull_back_cost(plan, 128, half).bytes_accessed / tokens,
    }
    # as of a forward, but ke in float32
    assert per_token["intra"] == 256 + 256 + 512 + 4 + (160 + 80) + 2 * 256 + 512 + 8
    # v, beta; kw, ke, decay; (I + A)^-1; the chunks' states and u
    assert per_token["states"] == 256 + 4 + (256 + 512 + 8) + 160 + state + 512
    # do, beta; kw, qe, ke, decay; (I + A)^-1 and Aqk; the chunks' dS and d_write
    assert per_token["retreat"] == 256 + 4 + (256 + 256 + 512 + 8) + (160 + 80) + state + 512
    # v, do, beta; u, d_write; both states; dv, dbeta; the gradients of A and Aqk, of kw, qe, ke, of decay
    assert per_token["contract"] == 2 * 256 + 4 + 2 * 512 + 2 * state + 256 + 4 + 2 * 160 + 3 * 256 + 8
    # q, k, g, beta; those gradients; dq, dk, dg, and dbeta in four parts
    assert per_token["pull_back"] == 2 * 256 + 512 + 4 + (2 * 160 + 3 * 256 + 8) + 2 * 256 + 512 + 4 * 4


def test_every_kernel_has_a_case_at_every_shape() -> None:
    for shape in SHAPES:
        found = list(cases(shape))
        names = {(case.kernel, case.dtype) for case in found}
        halves = {"kda_intra", "kda_state", "kda_state, boundaries", "kda_prefill"}
        halves |= {"kda_states", "kda_retreat", "kda_contract", "kda_pull_back", "kda_prefill, gradient"}
        assert names == {(name, dtype) for name in halves for dtype in ("bfloat16", "float32")} | {
            ("kda_step", "float32")
        }
        assert {case.kernel: case.most_kernels for case in found if case.most_kernels > 1} == {
            "kda_prefill": 4,
            "kda_prefill, gradient": 6,
        }
        assert {case.kind for case in found} == {"forward", "backward", "step"}
        assert all(case.cost.flops > 0 and case.cost.bytes_accessed > 0 for case in found)
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    assert {target.name for target in TARGETS} == set(command.MOST_SPILLED)


class Stand(Toolchain):
    """A toolchain that says what it is told to."""

    said: ClassVar[dict[str, Compiled] | Exception]
    seconds: ClassVar[float]

    def __init__(self, folder: Path) -> None:
        pass

    def compile(self, *_: Any) -> tuple[dict[str, Compiled], float]:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said, self.seconds


FINE, SPILLED = Compiled(255, 0), Compiled(255, 8)


@pytest.mark.parametrize(
    "said, seconds, words",
    [
        (
            {"kda_step": SPILLED},
            1.0,
            "kda_step, float32, small, sm_90a: spills 8 bytes a thread, 0 are allowed",
        ),
        ({"kda_step": FINE}, 61.0, "took 61 s to compile, 60 are allowed"),
        ({"kda_intra": FINE}, 1.0, "the assembler was not asked for kda_step, only for ['kda_intra']"),
        ({"kda_step": FINE, "add": FINE}, 1.0, "runs 2 kernels, 1 are allowed: ['add', 'kda_step']"),
        (ValueError("no such thing\nmore"), 1.0, "does not compile: no such thing"),
        ({"kda_step": FINE}, 1.0, None),
    ],
    ids=["spill", "slow", "absent", "many", "error", "fine"],
)
def test_a_kernel_that_falls_short_fails_the_check(
    said: dict[str, Compiled] | Exception, seconds: float, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = [case for case in cases(SHAPES[-1]) if case.kernel == "kda_step"]
    monkeypatch.setattr(command, "cases", lambda shape: step)
    monkeypatch.setattr(command, "Toolchain", Stand)
    monkeypatch.setattr(Stand, "said", said, raising=False)
    monkeypatch.setattr(Stand, "seconds", seconds, raising=False)
    result = CliRunner().invoke(app, ["check", "--shape", "small", "--target", "sm_90a"])
    assert result.exit_code == (0 if words is None else 1)
    assert (words or "") in result.stderr


@pytest.mark.parametrize(
    "options, words",
    [
        (["--shape", "huge"], "no shape huge; there are kimi-linear-48b, kimi-k3, small"),
        (["--target", "sm_1"], "no target sm_1; there are sm_90a, sm_80"),
        ([], "plugin is not installed"),
    ],
    ids=["shape", "target", "tools"],
)
def test_a_mistake_is_one_line(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(folder: Path) -> None:
        raise Missing("JAX's CUDA plugin is not installed; make check does")

    monkeypatch.setattr(command, "Toolchain", missing)
    result = CliRunner().invoke(app, ["check", *options])
    assert result.exit_code == 1 and words in result.stderr and result.stderr.count("\n") == 1
