"""`bench cache`: traces, the replay against counts by hand, foresight, and what is written."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import cache as bench
from benchmarks import foresight
from benchmarks.agent_trace import agent_requests, lines
from benchmarks.foresight import foresee, goals, unseen
from benchmarks.replay import Sizes, replay
from benchmarks.trace import BLOCK, UNKNOWN, Request, parse, read
from cache.placement import place
from cache.plan import Limits, Missing, ResumePlan
from cache.retention import Creation, Kind, policy
from cache.store import Store
from cache.tokens import Tokens
from kda_jax.commands import run

TOY = [
    Request(0.0, 1600, (1, 2, 3)),
    Request(10.0, 2600, (1, 2, 3, 4, 5)),  # goes on where the first ended
    Request(20.0, 1700, (1, 2, 9)),  # leaves it after two blocks
    Request(30.0, 1600, (1, 2, 10)),  # and so does this one
]
SMALL = Sizes(1000, 1)


@pytest.mark.parametrize(
    ("name", "recomputed", "hits"),
    [
        ("prompt_end", 1600 + (2600 - 1536) + 1700 + 1600, 1),
        ("prompt_end+branch", 1600 + (2600 - 1536) + 1700 + (1600 - 1024), 2),
        ("lru", 1600 + (2600 - 1536) + 1700 + (1600 - 1024), 2),
        ("path_cap:8", 1600 + (2600 - 1536) + 1700 + (1600 - 1024), 2),
        ("interval:512", 1600 + (2600 - 1536) + (1700 - 1024) + (1600 - 1024), 3),
        ("interval:1024", 1600 + (2600 - 1024) + (1700 - 1024) + (1600 - 1024), 3),
        ("second_use", 1600 + 2600 + 1700 + (1600 - 1024), 1),
        ("ours", 1600 + (2600 - 1536) + (1700 - 1024) + (1600 - 1024), 3),
    ],
)
def test_a_toy_trace_recomputes_what_a_hand_counts(name: str, recomputed: int, hits: int) -> None:
    got = replay(TOY, policy(name), SMALL, 1.0)
    assert got["recomputed"] == pytest.approx(recomputed / 7500, abs=1e-12)
    assert (got["hits"], got["evicted"], got["requests"]) == (hits, 0, 4)


def test_under_a_tight_budget_what_was_used_last_is_kept() -> None:
    prompts = [Request(float(at), 1600, (3 * at, 3 * at + 1, 3 * at + 2)) for at in range(4)]
    # two of them fit: at the end 3 and 2 are there, 1 is not
    requests = [*prompts, prompts[3], prompts[2], prompts[1]]
    got = replay(requests, policy("lru"), Sizes(10_000, 1), 30_000 / 1e9)
    assert got["recomputed"] == pytest.approx((5 * 1600 + 2 * 64) / (7 * 1600))
    assert (got["hits"], got["made"], got["evicted"], got["held"]) == (2, 5, 3, 2)


def test_foresight_keeps_what_is_used_next() -> None:
    assert goals(TOY) == [0, 3, 2, 2]
    assert unseen(TOY) == pytest.approx((1600 + 1064 + 676 + 576) / 7500)
    assert foresee(TOY, SMALL, 1.0)["recomputed"] == pytest.approx(unseen(TOY))
    # a prompt that never comes again is not kept; of two, the one that comes sooner is
    far, near = Request(0.0, 1600, (1, 2, 3)), Request(1.0, 1600, (4, 5, 6))
    got = foresee([far, near, Request(2.0, 600, (7,)), near, far], Sizes(10_000, 1), 12_000 / 1e9)
    assert (got["hits"], got["evicted"]) == (1, 1)
    assert got["recomputed"] == pytest.approx((1600 + 1600 + 600 + 64 + 1600) / 7000)


def test_foresight_computes_the_last_token_too() -> None:
    whole = Request(0.0, 2 * BLOCK, (1, 2))
    assert goals([whole, whole]) == [0, 1]
    assert foresee([whole, whole], SMALL, 1.0)["recomputed"] == pytest.approx(3 / 4)


def test_foresight_finds_the_least_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "_LOOKED_AT", 1)
    prompts = [Request(float(at), 1600, (3 * at, 3 * at + 1, 3 * at + 2)) for at in range(3)]
    # room for two; all come again, the first one last
    got = foresee([*prompts, *reversed(prompts)], Sizes(10_000, 1), 24_000 / 1e9)
    assert (got["hits"], got["evicted"]) == (2, 1)
    # room for one, and of two one comes sooner, and twice
    got = foresee([*prompts[:2], prompts[1], prompts[1], prompts[0]], Sizes(10_000, 1), 12_000 / 1e9)
    assert (got["hits"], got["evicted"]) == (2, 1)
    assert got["recomputed"] == pytest.approx((3 * 1600 + 2 * 64) / 8000)


def test_the_deepest_checkpoint_of_a_prompt_is_published_first(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[int] = []

    def put(store: Store, namespace: bytes, tokens: Tokens, *rest: object, **kind: object) -> Store:
        published.append(len(tokens))
        return store

    monkeypatch.setattr(Store, "put", put)
    replay(TOY[:1], policy("ours"), SMALL, 1.0)
    assert published == [1536, 1024, 512]


def test_boundaries_before_the_end_lie_beyond_what_is_known() -> None:
    resumed = ResumePlan(0, None, None, (), 0, 0, (Missing(1300, Kind.BRANCH),), ())
    creation = Creation(kinds=frozenset({Kind.BEFORE_END}), before_end=(256, 512))
    assert place(resumed, 1600, Limits(grid=1), creation) == ((1344, Kind.BEFORE_END),)
    assert place(resumed, 1600, Limits(grid=64), creation) == ((1344, Kind.BEFORE_END),)


def test_tokens_are_equal_where_blocks_are() -> None:
    tokens = TOY[0].tokens()
    assert tokens.shape == (1600,) and (tokens[: 2 * BLOCK] == TOY[2].tokens()[: 2 * BLOCK]).all()
    assert (tokens[3 * BLOCK :] == UNKNOWN).all() and not (tokens[: 3 * BLOCK] == UNKNOWN).any()


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_is_read_with_whole_blocks_only(tmp_path: Path, name: str) -> None:
    text = '{"timestamp": 1500, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]}\n'
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert read(path) == [Request(1.5, 1100, (7, 8), 3)]


@pytest.mark.parametrize("line", ["{", "{}", '{"timestamp": 0, "input_length": 600, "hash_ids": []}'])
def test_a_line_that_is_no_request_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 1 is no request"):
        list(parse([line], Path("trace.jsonl")))


def test_the_agent_workload_is_what_its_seed_says() -> None:
    few = agent_requests(seed=3, sessions=4)
    assert few == agent_requests(seed=3, sessions=4) != agent_requests(seed=4, sessions=4)
    rows = agent_requests(seed=3)
    requests = list(parse(lines(rows), Path("agent")))
    total = sum(request.num_tokens for request in requests)
    assert (len(requests), total) == (12_480, 472_622_881)
    assert unseen(requests) == pytest.approx(0.0501, abs=5e-5)
    assert max(request.num_tokens for request in requests) < 2**18
    assert all(a["timestamp"] <= b["timestamp"] for a, b in pairwise(rows))


@pytest.mark.parametrize(
    ("name", "requests", "tokens", "least"),
    [("conversation", 12_031, 144_793_823, 0.6266), ("synthetic", 3_993, 61_194_628, 0.3496)],
)
def test_the_traces_are_whole(name: str, requests: int, tokens: int, least: float) -> None:
    _, trace = bench.load(name)
    assert (len(trace), sum(request.num_tokens for request in trace)) == (requests, tokens)
    assert unseen(trace) == pytest.approx(least, abs=1e-4)


def test_sizes_are_kimi_k3s() -> None:
    assert bench.sizes("fp32", None) == (449_372_160, 27_648)
    assert bench.sizes("int8", None) == (108_527_616 + 3_391_488 + 15_261_696, 27_648)
    assert bench.sizes("fp32", 429_496_730).checkpoint == 429_496_730
    assert bench.sizes("int8", 429_496_730).checkpoint == pytest.approx(
        429_496_730 * 127_180_800 / 449_372_160, abs=1
    )


def test_a_run_writes_figures_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "toy.jsonl"
    rows = [
        {"timestamp": r.seconds * 1000, "input_length": r.num_tokens, "hash_ids": list(r.blocks)} for r in TOY
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "new" / "cache.json"
    budgets = ["--budget-gb", "64", "256", "1000"]
    policies = ["--policy", "ours", "--policy", "foresight", "--policy", "prompt_end"]
    assert (
        run(
            [
                "bench",
                "cache",
                "--trace",
                str(trace),
                *budgets,
                "--state",
                "int8",
                *policies,
                "--json",
                str(out),
            ]
        )
        == 0
    )
    result = json.loads(out.read_text())
    assert [(r["policy"], r["state"], r["budget_gb"]) for r in result["results"]] == [
        (name, "int8", budget) for name in ("ours", "foresight", "prompt_end") for budget in (64, 256, 1000)
    ]
    assert result["results"][0]["recomputed"] == pytest.approx(3916 / 7500)
    assert {"made", "evicted", "hits", "requests_per_s"} <= result["results"][0].keys()
    assert result["trace"] == "toy" and out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "0.5221" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "nowhere"], "no trace 'nowhere': name a file, agent, or one of conversation, synthetic"),
        (["--policy", "best"], "no policy 'best'; there are ours, lru"),
        (["--state", "fp8"], "a checkpoint is held in fp32 or int8"),
        (["--budget-gb", "0"], "must be positive numbers of gigabytes"),
        (["--checkpoint-bytes", "0"], "checkpoint_bytes=0 must be positive"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "cache", *options]) == 1
    assert message in capsys.readouterr().err
