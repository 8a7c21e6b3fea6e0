"""`python -m pallas_kernels check`: what it reads from the assembler, what it counts, and how it fails."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from pallas_kernels.__main__ import app
from pallas_kernels.check import command, gpu, tpu
from pallas_kernels.check.cases import cases
from pallas_kernels.check.cases.kda_decode import kda_decode
from pallas_kernels.check.targets import TARGETS
from pallas_kernels.check.toolchain import Compiled, Kernel, Missing, Toolchain
from pallas_kernels.kda.tpu import cost
from pallas_kernels.kda.triton.backward.cost import (
    contract_cost,
    pull_back_cost,
    retreat_cost,
    states_cost,
)
from pallas_kernels.kda.triton.cost import intra_cost, state_cost, step_cost
from pallas_kernels.kda.triton.tile import Plan
from pallas_kernels.shapes import SHAPES, Shape
from pallas_kernels.short_conv.cost import conv_cost
from pallas_kernels.state_compression.cost import compress_cost, decompress_cost

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
    assert gpu.parse(LOG) == (Kernel("kda_intra", 170, 0), Kernel("loop_add_fusion", 12, 16))
    assert gpu.parse("") == ()


MODULE = """HloModule jit_f
  %custom-call.7 = s32[9]{0} custom-call(%p), custom_call_target="AssumeGatherIndicesInBound", metadata={op_name="jit(f)/kda_no/pallas_call"}
  %kda_chunks.2 = f32[9]{0} custom-call(%a, %b), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/kda_chunks/pallas_call"}, backend_config={}
  %kda_chunks.3 = f32[9]{0} custom-call(%a, %b), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/kda_chunks/pallas_call"}, backend_config={}
  %transpose_jvp_kda_states__.1 = f32[9]{0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/transpose(jvp(kda_states))/pallas_call" stack_frame_id=4}
  %fusion.3 = f32[9]{0} fusion(%kda_chunks.3), kind=kLoop, metadata={op_name="jit(f)/kda_other/pallas_call"}
  %odd = f32[9]{0} custom-call(%a), custom_call_target="tpu_custom_call"
"""  # noqa: E501 - as XLA writes it


def test_a_tpus_kernels_are_those_that_its_module_calls() -> None:
    names = ["kda_chunks", "kda_chunks", "kda_states", "unknown"]
    assert tpu.parse(MODULE) == tuple(Kernel(name) for name in names)


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


def test_bytes_of_a_tpus_passes_are_those_of_their_arrays() -> None:
    state = 4 * 128**2
    work = cost.Work(chunks=128, sequences=1, heads=32, keys=128, values=128, itemsize=2)
    row = 3 * 256 + 512 + 4  # q, k, v; g; beta
    per_head = {
        "forward": (cost.forward_cost(work, 0), 8192 * (row + 256) + 2 * state),
        "boundaries": (cost.forward_cost(work, 3), 8192 * (row + 256) + 5 * state),
        "states": (cost.states_cost(work), 8192 * (row - 256) + 129 * state),
        "backward": (cost.backward_cost(work), 8192 * (2 * row + 256) + 130 * state),
    }
    for name, (counted, wanted) in per_head.items():
        assert counted.bytes_accessed == 32 * wanted, name


def test_bytes_of_small_kernels_are_those_of_their_arrays() -> None:
    x, weight, window = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 100, 6), (4, 6), (2, 3, 6))
    )
    # inputs and outputs; taps; two windows in, two out and two at boundaries
    assert conv_cost(x, weight, window, 1, "silu").bytes_accessed == 2 * (2 * 100 * 6 + 4 * 6 + 3 * 2 * 3 * 6)
    for count in (compress_cost, decompress_cost):
        assert count(10, 128).bytes_accessed == 10 * (128 * (4 + 1) + 4)


def test_bytes_of_a_decode_step_are_those_of_its_arrays() -> None:
    shape = SHAPES[0]
    rows, heads = shape.rows, shape.heads
    cost = {case.kernel: case.cost.bytes_accessed for case in kda_decode(shape) if case.dtype == "bfloat16"}
    state, window, channels = 4 * 128**2, 2 * 3 * 3 * 128, 3 * 128  # of a head
    token = 2 * (channels + 128 + 1 + 128 + 128)  # mixed, decay, beta, gate, out
    parameters = 2 * (4 * heads * channels + 128) + 4 * heads * (1 + 128)
    assert cost["kda_decode"] == rows * heads * (2 * (state + window) + token) + parameters
    assert cost["kda_draft"] == rows * heads * (5 * (state + window) + 4 * token) + parameters


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


BOTH = ("bfloat16", "float32")
KERNELS = {
    "gpu": {
        **dict.fromkeys(("kda_intra", "kda_state", "kda_state, boundaries", "kda_prefill"), BOTH),
        **dict.fromkeys(
            ("kda_states", "kda_retreat", "kda_contract", "kda_pull_back", "kda_prefill, gradient"), BOTH
        ),
        **dict.fromkeys(("mla_attend, prefill", "mla_attend, decode"), (*BOTH, "float8_e4m3fn")),
        **dict.fromkeys(("kda_decode", "kda_draft", "mla_combine"), BOTH),
        **dict.fromkeys(("short_conv", "short_conv, pack and boundaries"), BOTH),
        **dict.fromkeys(("kda_step", "compress_state", "decompress_state"), ("float32",)),
    },
    "tpu": {
        **dict.fromkeys(("kda_chunks", "kda_backward", "short_conv"), BOTH),
        **dict.fromkeys(("mla_attend, prefill", "mla_attend, decode"), (*BOTH, "float8_e4m3fn")),
        **dict.fromkeys(
            ("kda_chunks, boundaries", "kda_step", "compress_state", "decompress_state"), ("float32",)
        ),
    },
}
SEVERAL = {"gpu": {"kda_prefill": 4, "kda_prefill, gradient": 6}, "tpu": {"kda_backward": 2}}
"""Programs of more than one kernel, and of how many."""


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("platform", KERNELS)
def test_every_kernel_has_a_case_at_every_shape(platform: str, shape: Shape) -> None:
    found = [case for case in cases(shape) if case.platform == platform]
    dtypes = {kernel: [case.dtype for case in found if case.kernel == kernel] for kernel in KERNELS[platform]}
    assert {kernel: sorted(some) for kernel, some in dtypes.items()} == {
        kernel: sorted(some) for kernel, some in KERNELS[platform].items()
    }
    assert {case.kernel for case in found} == set(dtypes)
    assert {case.kind for case in found} == {"forward", "backward", "step"}
    assert {case.kernel: case.most_kernels for case in found if case.most_kernels > 1} == SEVERAL[platform]
    assert all(case.cost.flops > 0 and case.cost.bytes_accessed > 0 for case in found)


def test_targets_have_names_of_their_own() -> None:
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    assert {target.name for target in TARGETS if target.platform == "gpu"} == set(command.MOST_SPILLED)
    assert {target.platform for target in TARGETS} == set(command.TOOLCHAINS)


class Stand(Toolchain):
    """A toolchain that says what it is told to, and remembers what for."""

    said: ClassVar[tuple[Kernel, ...] | Exception]
    seconds: ClassVar[float]
    asked: ClassVar[list[str]] = []

    def __init__(self, folder: Path) -> None:
        pass

    def compile(self, function: Any, arguments: Any, target: Any) -> Compiled:
        self.asked.append(target.name)
        if isinstance(self.said, Exception):
            raise self.said
        return Compiled(
            self.said, self.seconds, 1, temporary_bytes=2, argument_bytes=3, output_bytes=4, reused_bytes=0
        )


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> type[Stand]:
    """In every toolchain's place, with the steps as the only cases."""
    steps = [case for case in cases(SHAPES[-1]) if case.kernel == "kda_step"]
    monkeypatch.setattr(command, "cases", lambda shape: steps)
    monkeypatch.setattr(command, "TOOLCHAINS", {"gpu": Stand, "tpu": Stand})
    monkeypatch.setattr(Stand, "seconds", 1.0, raising=False)
    monkeypatch.setattr(Stand, "asked", [])
    return Stand


FINE, SPILLED, ON_TPU = Kernel("kda_step", 255, 0), Kernel("kda_step", 255, 8), Kernel("kda_step")


@pytest.mark.parametrize(
    "target, said, seconds, words",
    [
        (
            "sm_90a",
            (SPILLED,),
            1.0,
            "kda_step, float32, small, sm_90a: spills 8 bytes a thread, 0 are allowed",
        ),
        ("sm_90a", (FINE,), 61.0, "took 61 s to compile, 60 are allowed"),
        ("sm_90a", (Kernel("kda_intra", 9, 0),), 1.0, "kda_step is not in the program, only ['kda_intra']"),
        ("sm_90a", (FINE, Kernel("add", 9, 0)), 1.0, "runs 2 kernels, 1 are allowed: ['add', 'kda_step']"),
        ("sm_90a", ValueError("no such thing\nmore"), 1.0, "does not compile: no such thing"),
        ("sm_90a", (FINE,), 1.0, None),
        ("v5e", (), 1.0, "kda_step, float32, small, v5e: kda_step is not in the program, only []"),
        ("v6e", (ON_TPU, ON_TPU), 1.0, "runs 2 kernels, 1 are allowed: ['kda_step', 'kda_step']"),
        ("v6e", (ON_TPU,), 61.0, "took 61 s to compile, 60 are allowed"),
        ("v6e", (ON_TPU,), 1.0, None),
    ],
    ids=[
        "spill",
        "slow",
        "absent",
        "many",
        "error",
        "fine",
        "tpu-absent",
        "tpu-many",
        "tpu-slow",
        "tpu-fine",
    ],
)
def test_a_kernel_that_falls_short_fails_the_check(
    target: str,
    said: tuple[Kernel, ...] | Exception,
    seconds: float,
    words: str | None,
    stand: type[Stand],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stand, "said", said, raising=False)
    monkeypatch.setattr(stand, "seconds", seconds)
    result = CliRunner().invoke(app, ["check", "--shape", "small", "--target", target])
    assert result.exit_code == (0 if words is None else 1)
    assert (words or "") in result.stderr


def test_a_case_is_compiled_for_the_targets_of_its_platform(
    stand: type[Stand], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stand, "said", (ON_TPU,), raising=False)
    report = tmp_path / "check.json"
    assert CliRunner().invoke(app, ["check", "--shape", "small", "--json", str(report)]).exit_code == 0
    assert stand.asked == ["sm_90a", "sm_80", "v5e", "v6e"]
    records = json.loads(report.read_text())["kernels"]
    assert [record["target"] for record in records] == stand.asked
    assert {
        (record["registers"], record["spill_bytes"], record["temporary_bytes"]) for record in records
    } == {(None, None, 2)}


def test_only_the_toolchains_asked_for_are_needed(
    stand: type[Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(command.TOOLCHAINS, "gpu", None)  # would not be callable
    monkeypatch.setattr(stand, "said", (ON_TPU,), raising=False)
    assert CliRunner().invoke(app, ["check", "--shape", "small", "--target", "v5e"]).exit_code == 0


@pytest.mark.parametrize("make", [gpu.GpuToolchain, tpu.TpuToolchain])
def test_a_missing_compiler_is_named(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        Missing, match=r"^(JAX's CUDA plugin|libtpu) is not installed; `make check` installs it$"
    ):
        make(tmp_path)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--shape", "huge"], "no shape huge; there are kimi-linear-48b, kimi-k3, small"),
        (["--target", "sm_1"], "no target sm_1; there are sm_90a, sm_80, v5e, v6e"),
        ([], "plugin is not installed"),
    ],
    ids=["shape", "target", "tools"],
)
def test_a_mistake_is_one_line(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(folder: Path) -> None:
        raise Missing("JAX's CUDA plugin is not installed; make check does")

    monkeypatch.setattr(command, "TOOLCHAINS", {"gpu": missing, "tpu": missing})
    result = CliRunner().invoke(app, ["check", *options])
    assert result.exit_code == 1 and words in result.stderr and result.stderr.count("\n") == 1
