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
from pallas_kernels.check.cases.kda_decode import kda_decode
from pallas_kernels.check.targets import TARGETS
from pallas_kernels.check.toolchain import Compiled, Missing, Toolchain, parse
from pallas_kernels.kda.triton.cost import intra_cost, merge_cost, state_cost, step_cost
from pallas_kernels.kda.triton.tile import Plan
from pallas_kernels.shapes import SHAPES

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kda_merge' for 'sm_90a'
ptxas info    : Function properties for kda_merge
    8 bytes stack frame, 272 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Compiling entry function 'loop_add_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_add_fusion
    8 bytes stack frame, 16 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers
ptxas info    : Compiling entry function 'kda_merge' for 'sm_90a'
ptxas info    : Function properties for kda_merge
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 170 registers
"""


def test_the_last_word_of_the_assembler_counts() -> None:
    assert parse(LOG) == {"kda_merge": Compiled(170, 0), "loop_add_fusion": Compiled(12, 16)}
    assert parse("") == {}


def test_bytes_of_a_forward_are_those_of_its_arrays() -> None:
    plan = Plan(8192, 32, 128, 128, work=jnp.dtype(jnp.bfloat16))
    tokens = 8192 * 32
    per_token = {
        "intra": intra_cost(plan, 128, jnp.dtype(jnp.bfloat16)).bytes_accessed / tokens,
        "merge": merge_cost(plan, 128).bytes_accessed / tokens,
        "state": state_cost(plan, 128, 0, 0, jnp.dtype(jnp.bfloat16)).bytes_accessed / tokens,
    }
    # q, k, g, beta; A and Aqk below the diagonal; kw, qe, ke; decay
    assert per_token["intra"] == 256 + 256 + 512 + 4 + (160 + 80) + 3 * 256 + 8
    assert per_token["merge"] == 2 * 160
    # v and out; kw, qe, ke; beta; (I + A)^-1 and Aqk; decay
    assert per_token["state"] == 2 * 256 + 3 * 256 + 4 + (160 + 80) + 8
    assert sum(per_token.values()) < 3900  # inputs and outputs alone are 1540
    assert step_cost(1, 1, 128, 128).bytes_accessed == 2 * 4 * 128**2 + 4 * (3 * 128 + 2 * 128 + 1)


def test_bytes_of_a_decode_step_are_those_of_its_arrays() -> None:
    shape = SHAPES[0]
    rows, heads = shape.rows, shape.heads
    cost = {case.kernel: case.cost.bytes_accessed for case in kda_decode(shape) if case.dtype == "bfloat16"}
    state, window, channels = 4 * 128**2, 2 * 3 * 3 * 128, 3 * 128  # of a head
    token = 2 * (channels + 128 + 1 + 128 + 128)  # mixed, decay, beta, gate, out
    parameters = 2 * (4 * heads * channels + 128) + 4 * heads * (1 + 128)
    assert cost["kda_decode"] == rows * heads * (2 * (state + window) + token) + parameters
    assert cost["kda_draft"] == rows * heads * (5 * (state + window) + 4 * token) + parameters


def test_every_kernel_has_a_case_at_every_shape() -> None:
    for shape in SHAPES:
        found = list(cases(shape))
        names = {(case.kernel, case.dtype) for case in found}
        halves = {"kda_intra", "kda_merge", "kda_state", "kda_state, boundaries", "kda_prefill"}
        halves |= {"kda_decode", "kda_draft"}
        assert names == {(name, dtype) for name in halves for dtype in ("bfloat16", "float32")} | {
            ("kda_step", "float32")
        }
        assert {case.kernel: case.most_kernels for case in found if case.most_kernels > 1} == {
            "kda_prefill": 4
        }
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
        ({"kda_merge": FINE}, 1.0, "the assembler was not asked for kda_step, only for ['kda_merge']"),
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
