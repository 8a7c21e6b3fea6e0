"""The benchmarks: what they promise to report, and that nobody is timed who computes something else."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import boundaries, decode, machine, model, ops, peak, timing, work
from benchmarks.contest import Contest, Outcome, Settings, hold
from benchmarks.contestant import Arrays, Contestant, Run
from benchmarks.inputs import Case, Inputs, draw
from benchmarks.jax_contestants import JaxContestant
from benchmarks.peers import OURS, OURS_WITH_GATE, PEERS
from benchmarks.timing import Contender, Timing, race, speedup
from kda_jax.config import ModelConfig
from random_model import small_config

SCAN = PEERS[0]
SMALL = {"H": 1, "K": 16, "V": 16}
SHORTEST = Settings(
    lengths=(64,),
    rounds={"forward": 2, "both": 2},
    budget_s={"forward": 1.0, "both": 1.0},
    min_rounds=2,
    quick=True,
)
# Who may fail at what, and how, by (name, gate, pass); everybody else who is installed must agree with ours.
# The naive chunked form takes the exponent of differences of either sign: it overflows with some inputs.
KNOWN_REFUSALS = {
    ("fla-core.naive_chunk_kda", "bounded", "both"): "not finite",
    ("fla-core.naive_chunk_kda", "unbounded", "both"): "not finite",
    ("tokamax", "unbounded", "forward"): "lower_bound",
}

# These two need Python 3.12 and the extra `peers`; the gate's 3.12 runs the operators' own tests only.
PEERS_HERE = [
    peer for peer in PEERS if sys.version_info >= (3, 12) or peer.package not in ("tokamax", "deltanet-tpu")
]


def silent(text: str) -> None:
    """A log that nobody reads."""


def one_config() -> ModelConfig:
    """A small model; transformers' own ids of special tokens would be beyond its vocabulary."""
    return small_config(bos_token_id=1, eos_token_id=2, pad_token_id=0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the benchmarks' clock shows; a test moves it, and nobody sleeps."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    return now


def test_race_interleaves_and_gives_slow_contenders_fewer_rounds(clock: list[float]) -> None:
    calls: list[str] = []
    takes = {"fast": 0.001, "slow": 0.02}

    def contender(name: str) -> Contender:
        def call(_: object) -> None:
            calls.append(name)
            clock[0] += takes[name]

        return Contender(name=name, call=call)

    timings = race([contender("fast"), contender("slow")], rounds=12, budget_s=0.07, settle_s=0.0)
    assert timings["fast"].rounds == 12
    assert timings["slow"].rounds == 3
    assert calls[:4] == ["fast", "slow", "fast", "slow"]  # untimed, then the first round
    where = [index for index, name in enumerate(calls) if name == "slow"]
    assert where[-1] > len(calls) - 4  # the last of the few rounds is at the end, not at the beginning
    assert timings["slow"].min_ms == pytest.approx(20)


def test_race_prepares_outside_the_clock(clock: list[float]) -> None:
    handed: list[object] = []

    def prepare() -> str:
        clock[0] += 0.05
        return "fresh"

    timings = race(
        [Contender(name="one", call=handed.append, prepare=prepare)], rounds=2, budget_s=1.0, settle_s=0.0
    )
    assert handed == ["fresh"] * 3
    assert timings["one"].min_ms == 0


@pytest.mark.parametrize("names, rounds", [(("a", "a"), 2), (("a",), 1)], ids=["same_name", "too_few"])
def test_race_rejects(names: tuple[str, ...], rounds: int):
    with pytest.raises(ValueError, match=r"different names|min_rounds"):
        race([Contender(name=name, call=lambda _: None) for name in names], rounds=rounds, budget_s=1.0)


def test_timing_figures_and_speedup():
    ours, peer = Timing((0.001, 0.002, 0.009)), Timing((0.004, 0.004, 0.006))
    assert ours.figures("forward") == {"forward_ms": 1.0, "forward_median_ms": 2.0, "forward_rounds": 3}
    assert speedup(ours, peer) == {"min": 4.0, "median": 2.0}


def test_machine_measures_rates():
    rates = machine.measure(size=64, read_mib=1, rounds=2)
    assert rates.keys() == {"matmul_gflops", "matmul_median_gflops", "read_gb_s", "read_median_gb_s"}
    assert all(rate > 0 for rate in rates.values())
    assert machine.best({"a": 1.0}, {"a": 2.0}) == {"a": 2.0}
    json.dumps(machine.describe())


@pytest.mark.parametrize("gate", ops.GATES)
def test_raw_gate_gives_the_same_decay(gate):
    inputs = draw(Case(gate=gate, T=8, **SMALL))
    raw = inputs.z + inputs.dt_bias
    if gate == "bounded":
        g = -5.0 / (1.0 + jnp.exp(-jnp.exp(inputs.A_log)[:, None] * raw))
    else:
        g = -jnp.exp(inputs.A_log)[:, None] * jnp.log1p(jnp.exp(raw))
    np.testing.assert_allclose(g, inputs.g, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("act", ["forward", pytest.param("both", marks=pytest.mark.slow)])
@pytest.mark.parametrize("gate", ops.GATES)
@pytest.mark.parametrize("peer", PEERS_HERE, ids=lambda peer: peer.name)
def test_every_peer_here_agrees_with_ours(peer, gate, act):
    contest = Contest(Case(gate=gate, T=64, H=1), SHORTEST, OURS_WITH_GATE, silent)
    passes = ("forward",) if act == "forward" else ("forward", "both")
    contest.enter_ours(OURS, passes)
    contest.enter(peer, passes)
    if peer.name in contest.outcome.absent:
        pytest.skip(contest.outcome.absent[peer.name])
    refused = {refusal["pass"]: refusal["reason"] for refusal in contest.outcome.refused}
    for each, why in refused.items():
        assert KNOWN_REFUSALS.get((peer.name, gate, each), "agreement") in why
    if "forward" not in refused:
        assert contest.errors[peer.name].keys() == set(passes) - refused.keys()


@dataclass(frozen=True)
class Spoiled:
    """The scan with one array multiplied by `factor`."""

    spoil: str
    factor: float
    name: str = "spoiled"
    package: str = "jax"
    raw_gate: bool = False
    keeps_states: int = 0

    def prepare(self, case: Case, inputs: Inputs) -> Run:
        run = SCAN.prepare(case, inputs)

        def both(arrays: Arrays) -> tuple[np.ndarray, ...]:
            return tuple(x * self.factor if i == 3 else x for i, x in enumerate(run.restore_both(arrays)))

        def forward(arrays: Arrays) -> tuple[np.ndarray, ...]:
            out, state = run.restore_forward(arrays)
            return out, state * self.factor

        spoiled = {"forward": forward, "both": both}[self.spoil]
        return run._replace(**{f"restore_{self.spoil}": spoiled})


@pytest.mark.parametrize("factor, why", [(1.001, "differs from ours"), (float("nan"), "not finite")])
@pytest.mark.parametrize("spoil, what", [("forward", "state"), ("both", "gate")])
def test_who_disagrees_is_not_timed(spoil, what, factor, why):
    outcome = judged(Spoiled(spoil, factor))
    (refusal,) = outcome.refused
    assert refusal["pass"] == spoil and why in refusal["reason"] and what in refusal["reason"]
    spoiled = [record for record in outcome.results if record["impl"] == "spoiled"]
    if spoil == "forward":
        assert not spoiled
    else:
        assert spoiled[0]["both_ms"] is None and spoiled[0]["forward_ms"] > 0


def judged(peer: Contestant) -> Outcome:
    """A contest between ours and one peer."""
    case = Case(gate="bounded", T=64, **SMALL)
    return hold(case, SHORTEST, ours=OURS, ours_with_gate=OURS_WITH_GATE, peers=(peer,), log=silent)


def test_a_peer_that_raises_is_refused_with_its_reason():
    def load():
        def operator(*args: object):
            raise NotImplementedError("no such gate\nmore")

        return lambda case, inputs: operator

    outcome = judged(JaxContestant(name="raises", package="jax", load=load))
    assert [refusal["reason"] for refusal in outcome.refused] == ["NotImplementedError: no such gate"]
    assert [record["impl"] for record in outcome.results] == ["ours"]


def test_ops_reports_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops, "GATES", ("bounded",))
    monkeypatch.setattr(ops, "HEADS", SMALL)
    monkeypatch.setattr(ops, "PEERS", (SCAN,))
    monkeypatch.setattr(ops.Settings, "quickest", classmethod(lambda cls: SHORTEST))
    monkeypatch.setattr(ops, "SHORT", 8)
    file = tmp_path / "ops.json"
    ops.main(json=file, only=("prefill", "decode"), quick=True)
    report = json.loads(file.read_text())
    assert {"results", "machine", "settings", "notes", "refused", "absent", "decode"} <= report.keys()
    assert report["machine"]["matmul_gflops"] > 0
    keys = {(record["impl"], record["gate"], record["T"]) for record in report["results"]}
    assert keys == {(impl, gate, 64) for impl in ("ours", "lax.scan") for gate in ops.GATES}
    for record in report["results"]:
        assert record["forward_ms"] > 0 and record["both_ms"] > 0
        assert record["forward_median_ms"] >= record["forward_ms"] and record["both_rounds"] == 2
        assert 0 < record["forward_matmul_share"] and 0 < record["both_matmul_share"]
        assert ("forward_speedup_of_ours" in record) == (record["impl"] != "ours")
    batches = {(record["impl"], record["B"]) for record in report["decode"]}
    assert {("ours", 1), ("ours", 4), ("lax.scan", 1), ("lax.scan", 4)} <= batches


def test_ops_knows_its_sections():
    assert ops.chosen(None) == ops.SECTIONS
    assert ops.chosen(["decode", "prefill"]) == ("prefill", "decode")
    with pytest.raises(ValueError, match="no section decod; there are prefill, short, boundaries, decode"):
        ops.chosen("decod")


def test_boundaries_are_measured():
    record = boundaries.measure(Case(gate="bounded", T=20, **SMALL), (1, 16, 19), rounds=2, log=silent)
    assert record["boundaries"] == [1, 16, 19] and record["with_ms"] > 0 and record["cost_min"] > 0


def test_decode_compares_before_it_times(monkeypatch: pytest.MonkeyPatch):
    def wrong_step():
        def step(q, k, v, g, beta, state):
            out, state = decode.plain_step()(q, k, v, g, beta, state)
            return out * 1.01, state

        return step

    monkeypatch.setitem(decode.STEPS, "wrong", ("jax", wrong_step))
    outcome = decode.measure(1, sizes={"H": 1, "K": 128, "V": 128}, rounds=2, log=silent)
    assert [refusal["impl"] for refusal in outcome.refused] == ["wrong"]
    assert {"ours", "lax.scan"} <= {record["impl"] for record in outcome.results}
    assert all(record["us_per_token"] > 0 for record in outcome.results)


def test_work_counts():
    # The published count at d = 128, C = 16: 6 d^2 + (3 + 2) C d + C^2 / 3.
    assert work.kda_flops_per_token_head(128, 128) == pytest.approx(108_629.33, abs=0.01)
    assert work.kda_flops(10, 2, 128, 128, backward=True) == 60 * work.kda_flops_per_token_head(128, 128)
    counted = work.ModelWork.of(ModelConfig.bench_41m())
    total = counted.shared + counted.expert_layers * 8 * counted.expert + 2 * counted.head
    assert total == pytest.approx(41.05e6, rel=1e-3)
    # Twice the rows read more experts, not more of anything else that is shared.
    one, two = (counted.decode_bytes(2048, batch) for batch in (1, 2))
    assert one < two < 2 * one


@pytest.fixture
def quiet_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory measurement, which takes a process of its own, replaced by figures."""
    keys = ("imported", "loaded", "first", "again", "above_weights", "again_above_weights")
    keys += ("again_above_before",)
    fake = {key: 1.0 for key in keys}
    monkeypatch.setattr(peak, "run", lambda impl, *_: {"impl": impl, "tokens": 1, **fake})


@pytest.mark.usefixtures("quiet_memory")
def test_model_reports_what_it_promises(tmp_path: Path):
    file = tmp_path / "model.json"
    settings = model.Settings(
        prefill=(20,), context=20, batches=(1,), steps=3, memory=20, rounds=2, budget_s=1.0, compared=20
    )
    size = {"size": 64, "read_mib": 1, "rounds": 2}
    model.run(one_config(), settings, json=file, machine_size=size)
    report = json.loads(file.read_text())
    impls = {"ours"} | ({"transformers"} - report["absent"].keys())
    cases = {(record["impl"], record["act"], record["batch"]) for record in report["results"]}
    assert cases == {(impl, act, 1) for impl in impls for act in ("prefill", "decode")}
    assert all(record["tokens_per_s"] > 0 for record in report["results"])
    assert all(record["same_tokens"] == 1.0 for record in report["results"] if record["act"] == "decode")
    assert all(error < 1e-4 for error in report["logits_errors"].values())
    assert {record["impl"] for record in report["memory"]} == impls
    shares = [record.get("matmul_share", record.get("bandwidth_share")) for record in report["results"]]
    assert all(value > 0 for value in shares)


def test_model_refuses_other_weights():
    class Fixed:  # all that `compare` asks of a contestant
        def __init__(self, name: str, factor: float):
            self.name, self.factor = name, factor

        def logits(self, tokens: np.ndarray) -> np.ndarray:
            return self.factor * np.ones((*tokens.shape, 4), np.float32)

    settings = model.Settings(compared=5)
    contestants: list[Any] = [Fixed("ours", 1.0), Fixed("other", 1.001)]
    with pytest.raises(RuntimeError, match=r"other's logits differ from ours by 1\.0e-03"):
        model.compare(contestants, one_config(), settings)


def test_llama_cpp_is_inferred_from_the_ratio_to_transformers():
    record = {"impl": "transformers", "act": "prefill", "tokens": 512, "batch": 1}
    (found,) = model.inferred([{**record, "speedup_of_ours": {"min": 9.0, "median": 7.44}}])
    assert found["ours_over_llama_cpp"] == pytest.approx(2.0, abs=0.01)
    assert model.inferred([{**record, "tokens": 513, "speedup_of_ours": {"median": 1.0}}]) == []


@pytest.mark.slow
def test_peak_memory_in_a_process_of_its_own(tmp_path: Path):
    from flax import nnx

    from kda_jax.model import Model
    from kda_jax.weights import save

    config = one_config()
    save(Model(config, rngs=nnx.Rngs(0)), tmp_path / "model")
    figures = peak.run("ours", tmp_path / "model", 64, config.vocab_size)
    assert (
        0 < figures["imported"] and figures["loaded"] <= figures["first"]
    )  # its weights are less than noise
    assert figures["above_weights"] == figures["first"] - figures["loaded"]
    with pytest.raises(RuntimeError, match="memory of ours failed"):
        peak.run("ours", tmp_path / "nowhere", 64, config.vocab_size)
