"""Who may import whom: a walk over every import of the product against two tables."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"kda_jax", "pallas_kernels", "cache", "transfer", "benchmarks", "tests", "examples"}
# what a package may import of ours; with a "-" in front, somebody else's package that it must not import
PACKAGES = {
    "pallas_kernels": {"-flax"},
    "cache": {"-flax"},
    "transfer": {"-flax", "-jax"},
    "kda_jax": {"pallas_kernels"},
}
# more for single files of kda_jax, and the order inside it: a file imports lower levels and itself only
MORE = {"kda_jax.commands": {"cache", "transfer", "benchmarks"}, "kda_jax.engine": {"cache", "transfer"}}
# the scheduler is a function of what it is told: its files import these of anybody else, and each other
PURE = {
    *("pages", "lookup", "request", "work", "sizes", "pool", "holdings", "admission"),
    *("decoding", "drafting", "prefilling", "scheduler"),
}
INNOCENT = {"__future__", "collections", "dataclasses", "enum", "typing", "weakref", "numpy", "cache"}
LEVELS = {
    **{"config": 0, "state": 1, "sharding": 2, "layers": 3, "model": 4, "forward": 5, "weights": 5},
    **{"tokenizer": 5, "sampling": 5, "generate": 6, "engine": 7, "": 8, "server": 9, "commands": 10},
    **{"__main__": 11},
}


def imports(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """Every module named by an import statement at any depth, with relative ones resolved."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = (
                module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            )
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def violations(root: Path) -> list[str]:
    """One line for each import that the tables forbid, and for each file of kda_jax that has no level."""
    wrong = []
    for package, allowed in PACKAGES.items():
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            unit = [*module.split("."), ""][1]
            allow = allowed | MORE.get(f"{package}.{unit}", set())
            if package == "kda_jax" and unit not in LEVELS:
                wrong.append(f"{module}: no level in LEVELS; give it one")
                continue
            for name in sorted(imports(ast.parse(path.read_text()), module, path.name == "__init__.py")):
                top, *rest = name.split(".")
                if package == "kda_jax" and unit == "engine" and parts[-1] in PURE:
                    pure = {f"kda_jax.engine.{other}" for other in PURE}
                    if top not in INNOCENT and not any(name.startswith(other) for other in pure):
                        wrong.append(f"{module} is pure and imports {name}")
                if f"-{top}" in allow or (top in OURS - {package} and top not in allow):
                    wrong.append(f"{module} imports {top}")
                if package == top == "kda_jax":
                    other = rest[0] if rest and rest[0] in LEVELS else ""
                    if other != unit and LEVELS[other] >= LEVELS[unit]:
                        wrong.append(f"{module} imports {other or 'kda_jax'}")
    return wrong


def test_nothing_imports_upwards() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        (
            "pallas_kernels/kda.py",
            "def f():\n    import kda_jax.config",
            "pallas_kernels.kda imports kda_jax",
        ),
        ("transfer/store.py", "from jax import numpy", "transfer.store imports jax"),
        ("cache/plan.py", "import transfer", "cache.plan imports transfer"),
        ("kda_jax/state.py", "from .layers import kda", "kda_jax.state imports layers"),
        ("kda_jax/layers/moe.py", "from ..model import Model", "kda_jax.layers.moe imports model"),
        ("kda_jax/weights/load.py", "from kda_jax import forward", "kda_jax.weights.load imports forward"),
        ("kda_jax/config.py", "from kda_jax import Model", "kda_jax.config imports kda_jax"),
        ("kda_jax/generate.py", "import cache", "kda_jax.generate imports cache"),
        (
            "kda_jax/engine/scheduler.py",
            "def f():\n    from jax import numpy",
            "kda_jax.engine.scheduler is pure and imports jax.numpy",
        ),
        (
            "kda_jax/engine/pages.py",
            "import time",
            "kda_jax.engine.pages is pure and imports time",
        ),
        ("kda_jax/helpers.py", "", "kda_jax.helpers: no level in LEVELS; give it one"),
    ],
    ids=lambda value: value if value.endswith(".py") else None,
)
def test_an_upward_import_is_found(tmp_path: Path, file: str, source: str, wrong: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path) == [wrong]
