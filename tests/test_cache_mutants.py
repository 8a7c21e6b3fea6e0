"""The state machines find what they are there for: a cache that is broken on purpose, one way at a time."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis.stateful import run_state_machine_as_test

ROOT = Path(__file__).resolve().parent.parent
OURS = {
    *("cache", "cache_laws", "cache_machine", "cache_storage"),
    *("naive_index", "oldest_first", "rolling_model", "test_cache_index"),
}
MUTANTS = {
    "the smaller of two lengths": (
        "plan.py",
        "boundary = hits[-1].boundary if hits else 0",
        "boundary = min(covered, last, max((item.boundary for item in states), default=0))",
    ),
    "a hit on the whole prompt": ("plan.py", "[item for item in whole if item.boundary <= last]", "whole"),
    "state without latents": ("view.py", "stop = 0\n", "return 10**9\n"),
    "one token of an edge is enough": ("node.py", "first = int(differ.argmax()) if count else 0", "return count"),
    "a fork keeps the state of the branch": ("tree.py", "  lower.rows,\n", "  lower.rows,\n        lower.states,\n"),
    "a fork takes all pages": ("tree.py", "        lower.names[:count],\n", "        lower.names,\n"),
    "pins are overlooked": ("tree.py", " or node.pinned:", ":"),
    "pinned checkpoints are evicted": ("contents.py", ".states or key in self.pinned:", ".states:"),
    "pins do not add up": ("store.py", "self.pinned.get(key, 0) + 1", "1"),
    "siblings' pages are dropped": ("tree.py", " or node.users[tier] ", " "),
    "pages outlive their pin": ("index.py", "(tier, trim(nodes, boundary, tier))", "(tier, ())"),
    "namespaces share": ("prompts.py", "KeyChain.start(namespace, page)", "KeyChain.start(bytes(32), page)"),
    "the tail has no name": ("keys.py", "if not len(self.tail):", "if True:"),
    "pages are put one too early": ("store.py", "pages[len(pages) - len(lacks) :]", "pages"),
    "other bytes are accepted": ("store.py", "if exact and not same(", "if False and not same("),
    "the budget is overrun": ("shelf.py", "max(0, self.nbytes - self.budget)", "0"),
    "bytes of pages stay counted": ("shelf.py", "size += nbytes(left.pop(name))", "left.pop(name)"),
    "a lost page breaks one checkpoint only": ("store.py", "for lost in keys:", "for lost in keys[:1]:"),
    "published before all of it is written": (
        "tiers.py",
        "        except OSError:  # the tier cannot take it: as good as no room\n            return False",
        "        except OSError:\n            return bool(holder.update(_publishing(key, tier, {}, {}, now)))",
    ),
    "dropped before it is demoted": ("tiers.py", "        any(_copy(", "        any(False and _copy("),
    "sources swap tiers": ("tier.py", "Tier((tiers & -tiers).bit_length() - 1)", "Tier(tiers.bit_length() - 1)"),
}  # fmt: skip


NOTHING = ("tree.py", "import numpy as np\n", "import numpy as np\n")


@pytest.fixture
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[ModuleType]]:
    """Modules with the state machines, over a copy of the cache in which one place is other than here."""
    file, right, wrong = request.param
    shutil.copytree(ROOT / "cache", tmp_path / "cache")
    source = (tmp_path / "cache" / file).read_text()
    assert source.count(right) == 1, f"{right!r} is not once in {file}"
    (tmp_path / "cache" / file).write_text(source.replace(right, wrong))
    mine = {name: module for name, module in sys.modules.items() if name.split(".")[0] in OURS}
    for name in mine:
        del sys.modules[name]
    sys.path.insert(0, str(tmp_path))
    try:
        yield [importlib.import_module("cache_machine"), importlib.import_module("test_cache_index")]
    finally:
        sys.path.remove(str(tmp_path))
        for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
            del sys.modules[name]
        sys.modules.update(mine)


def notices(modules: list[ModuleType], steps: int) -> bool:
    """Whether a state machine fails."""
    machine_module, index_module = modules
    settings = machine_module.history_settings(steps, shrink=False)
    for machine in (machine_module.StoreMachine, index_module.IndexMachine):
        try:
            run_state_machine_as_test(machine, settings=settings)
        except (Exception, pytest.fail.Exception):
            return True
    return False


@pytest.mark.parametrize(
    "broken", MUTANTS.values(), indirect=True, ids=[name.replace(" ", "-") for name in MUTANTS]
)
def test_a_broken_cache_is_found(broken: list[ModuleType]) -> None:
    assert notices(broken, 20_000)


@pytest.mark.parametrize("broken", [NOTHING], indirect=True, ids=["nothing"])
def test_a_whole_cache_is_not(broken: list[ModuleType]) -> None:
    copy = Path(sys.modules["cache.tree"].__file__ or "")
    assert ROOT not in copy.parents
    assert not notices(broken, 500)
