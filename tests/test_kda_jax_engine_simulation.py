"""The scheduler under faults: thousands of events by seed keep every law, and what is broken on purpose is found."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = [
    *(
        f"kda_jax.engine.{name}"
        for name in (
            *("pages", "lookup", "request", "work", "sizes", "pool", "holdings"),
            *("admission", "decoding", "drafting", "prefilling", "scheduler"),
        )
    ),
    *(
        "engine_device",
        "engine_drafter",
        "engine_setup",
        "engine_remote",
        "engine_instance",
        "engine_simulation",
    ),
]
SEEDS = 150
"""Within so many a mutant is found."""
MUTANTS = {
    "pages are freed while work in flight writes them": (
        "scheduler",
        "if live.outcome and not live.busy and",
        "if live.outcome and",
    ),
    "loads are not waited for": (
        "scheduler",
        "(*snapshots, *zeros, *restores, *chunks, *rows, *loads):",
        "(*snapshots, *zeros, *restores, *chunks, *rows):",
    ),
    "published before it is known to be whole": (
        "scheduler",
        "if chunk.id in results.failed:",
        "if chunk.id in results.failed and chunk.samples:",
    ),
    "a snapshot that failed is published": (
        "scheduler",
        "        if failed:\n            self.pool",
        "        if False:\n            self.pool",
    ),
    "a state is published one token early": (
        "scheduler",
        "live.tokens[: snapshot.boundary]",
        "live.tokens[: max(1, snapshot.boundary - 1)]",
    ),
    "a slot is not cleared": ("admission", "zeros.append(Zero(live.request.id, live.slot))", "pass"),
    "the boundary is not pinned": ("admission", "    holdings.pin(live, plan.key)\n", ""),
    "a pin is not given back": (
        "scheduler",
        "def _restored(self, live: Live, failed: bool) -> None:\n        self.holdings.unpin(live)",
        "def _restored(self, live: Live, failed: bool) -> None:\n        live.pinned = None",
    ),
    "pins of those who wait are never given back": (
        "holdings",
        "                self.unpin(waiting[-1])\n            return bool(waiting)",
        "                pass\n            return False",
    ),
    "what would be resumed keeps out who resumes": (
        "admission",
        "if any(other.slot is not None",
        "if True or any(other.slot is not None",
    ),
    "an unfinished page is shared": (
        "pool",
        "table[held : len(tokens) // unit]",
        "table[held : -(-len(tokens) // unit)]",
    ),
    "shared pages are not counted": (
        "admission",
        "    holdings.pool.pages.share(tuple(shared.values()))\n",
        "",
    ),
    "shared pages stay counted after a refusal": (
        "admission",
        "        holdings.pool.pages.give_back(tuple(shared.values()))\n",
        "",
    ),
    "pages of a failed checkpoint are lost": (
        "scheduler",
        "                self.pool.pages.give_back(snapshot.pages)\n",
        "                pass\n",
    ),
    "the slot of who ended is lost": (
        "holdings",
        "            self.slots.give_back(live.slot)\n",
        "            pass\n",
    ),
    "page 0 is given out": ("pages", "range(num_pages - 1, 0, -1)", "range(num_pages - 1, -1, -1)"),
    "slot 0 is given out": ("pages", "range(num_slots - 1, 0, -1)", "range(num_slots - 1, -1, -1)"),
    "collected pages do not come back": ("pages", "range(len(self._collected))", "range(0)"),
    "a load that failed is resumed": ("scheduler", "if broken and not live.outcome:", "if False:"),
    "a lost tier is asked again and again": (
        "scheduler",
        "            live.tiers &= ~tier.bit\n",
        "            key = None\n",
    ),
    "a load reads pages of the pool twice": ("admission", "if source.tier is not Tier.DEVICE:", "if True:"),
    "who is cancelled hears more": (
        "scheduler",
        "        if live.outcome:\n            return\n        tokens =",
        "        tokens =",
    ),
    "who is preempted computes on": ("scheduler", "if self.live[row.id].stage is Stage.DECODING", "if True"),
    "rows are computed twice": (
        "scheduler",
        "                live.computed += 1 + sampled.accepted\n",
        "                live.computed += sampled.accepted\n",
    ),
    "a prefill is cut anywhere": (
        "prefilling",
        "(start + budget) // sizes.grid * sizes.grid",
        "start + budget",
    ),
    "rows cost nothing": ("scheduler", "sum(1 + len(row.drafts)", "sum(len(row.drafts)"),
    "drafts cost nothing": ("scheduler", "sum(1 + len(row.drafts)", "sum(1"),
    "drafts leave a prefill nothing": (
        "drafting",
        "        spare -= holdings.sizes.grid\n",
        "        pass\n",
    ),
    "all rows spend the same rest": ("drafting", "        spare -= len(drafts)\n", ""),
    "drafts go past the last token": ("drafting", "live.generated - 1)", "live.generated)"),
    "drafts have no page": (
        "drafting",
        "        live.table += holdings.pool.pages.take(1) or ()\n    return drafts[: "
        "len(live.table) * holdings.sizes.rows - live.computed - 1]",
        "        pass\n    return drafts",
    ),
    "rows have their pages of before": ("drafting", ", table=tuple(live.table)", ""),
    "wrong drafts are kept": ("scheduler", "drafts[: sampled.accepted]", "drafts[:]"),
    "right drafts are not told": (
        "scheduler",
        "*drafts[: sampled.accepted], sampled",
        "*drafts[:0], sampled",
    ),
    "wrong drafts count as computed": ("scheduler", "1 + sampled.accepted\n", "1 + len(row.drafts)\n"),
    "right drafts are computed again": ("scheduler", "1 + sampled.accepted\n", "1\n"),
    "deadlines are not kept": ("scheduler", "        self._expire(now)\n", ""),
    "who came last starts first": ("admission", "for each in queue if", "for each in reversed(queue) if"),
    "an end is told twice": (
        "scheduler",
        "        if not live.outcome:\n            live.outcome",
        "        if True:\n            live.outcome",
    ),
    "who made room waits for ever": (
        "scheduler",
        "            self.holdings.back(live)\n            self.holdings.pin(live, key)",
        "            pass",
    ),
}
NOTHING = ("scheduler", "import", "import")


def world_of(monkeypatch: pytest.MonkeyPatch, mutant: tuple[str, str, str]) -> ModuleType:
    """The simulation over a scheduler in which one place is other than here."""
    file, right, wrong = mutant
    for name in MODULES:
        folder = ROOT if "." in name else ROOT / "tests"
        path = folder / f"{name.replace('.', '/')}.py"
        source = path.read_text()
        if name == f"kda_jax.engine.{file}" and mutant is not NOTHING:
            assert source.count(right) == 1, f"{right!r} is not once in {path.name}"
            source = source.replace(right, wrong)
        module = ModuleType(name)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, str(path), "exec"), module.__dict__)
    return sys.modules["engine_simulation"]


def first_found(simulation: ModuleType) -> tuple[int, Exception] | None:
    """The first seed that fails, and how."""
    for seed in range(SEEDS):
        try:
            simulation.World(seed).run()
        except Exception as error:
            return seed, error
    return None


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_what_is_broken_is_found(monkeypatch: pytest.MonkeyPatch, mutant: tuple[str, str, str]) -> None:
    assert first_found(world_of(monkeypatch, mutant)), f"{SEEDS} seeds did not find it"


def test_every_law_holds(engine_events: int) -> None:
    simulation = importlib.import_module("engine_simulation")
    count, seed, happened = 0, 0, Counter()
    while count < engine_events:
        try:
            world = simulation.World(seed).run()
        except Exception:
            pytest.fail(simulation.minimised(seed))
        count, seed, happened = count + world.count, seed + 1, happened + world.happened
    rare = {
        "preempted",
        "loads",
        "load failed",
        "restores",
        "cancelled",
        "expired",
        "failed",
        "overload",
        "copy",
        "killed",
        "remote loads",
        "leased",
        "filled",
        "accepted",
    }
    assert all(happened[name] for name in rare), happened
    assert happened["accepted"] < happened["drafted"]


def test_the_same_seed_has_the_same_trace_whatever_the_hashes() -> None:
    simulation = importlib.import_module("engine_simulation")
    traces = [simulation.World(seed).run().trace.hexdigest() for seed in (1, 2, 1)]
    assert traces[0] == traces[2] != traces[1]
    again = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "engine_simulation.py"), "--seed", "1", "--trace"],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stdout.strip() == traces[0]


def test_a_failure_says_its_seed_and_the_faults_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = world_of(monkeypatch, MUTANTS["a load that failed is resumed"])
    found = first_found(simulation)
    assert found
    text = simulation.minimised(found[0])
    assert text.startswith(f"seed {found[0]}: ") and "Setup(" in text
    faults = re.search(r"faults that it takes: \[(.*)\]", text)
    assert faults and 1 <= len(faults[1].split(",")) <= 4
    assert any(kind in faults[1] for kind in ("load", "lost", "damaged")), "without one no load fails"
