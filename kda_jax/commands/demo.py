"""`demo`: one prompt, read once, and three continuations from its checkpoints, one in another process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kda_jax.commands.errors import CommandError

if TYPE_CHECKING:
    from kda_jax.commands.forks import Fork, Row
    from kda_jax.tokenizer import Tokenizer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny"
PROMPT_TOKENS = 2600
BOUNDARIES = (1024, 2560)


def demo(
    model: Annotated[Path, typer.Option(help="A checkpoint in Hugging Face's layout.")] = EXAMPLE,
    source: Annotated[
        Path | None, typer.Option(help="Text to read (default: the library's argparse.py).")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write in each continuation.")] = 120,
    store: Annotated[
        str, typer.Option(help="Where the second process finds its checkpoint: disk, or mooncake.")
    ] = "disk",
) -> None:
    """Read a source file once, fork it from three checkpoints, and compare with runs that never stopped."""
    import argparse

    from kda_jax.commands.forks import compare
    from kda_jax.commands.stores import KINDS
    from kda_jax.tokenizer import load_tokenizer
    from kda_jax.weights.load import load

    if store not in KINDS:
        raise CommandError(f"{store!r} is no kind of store: give --store {' or '.join(KINDS)}")
    if not model.exists():
        raise CommandError(f"no model at {model}; run this in a checkout, or name a checkpoint with --model")
    source = source or Path(argparse.__file__)
    loaded, tokenizer = load(model, dtype="float32"), load_tokenizer(model)  # laws on bits hold in float32
    ids = tokenizer.encode(source.read_text(encoding="utf-8"))
    if len(ids) < PROMPT_TOKENS:
        raise CommandError(f"{source} has {len(ids)} tokens; the demo reads at least {PROMPT_TOKENS}")
    prompt = ids[: _end(tokenizer, ids, PROMPT_TOKENS, "\n\n")]
    print(f"{source.name}: {len(prompt)} tokens, read once, checkpoints at {[*BOUNDARIES, len(prompt)]}\n")
    rows = compare(loaded, model, prompt, _forks(tokenizer, ids, len(prompt)), new_tokens, store)
    _print(rows, tokenizer)
    if wrong := [row.fork.what for row in rows if not row.identical]:
        print(
            f"kda_jax: not bit-identical to the run that never stopped: {'; '.join(wrong)}", file=sys.stderr
        )
        raise typer.Exit(1)


def demo_resume(task: Path, result: Path) -> None:
    """The demo's second process."""
    from kda_jax.commands.forks import resume

    resume(task, result)


def _end(tokenizer: Tokenizer, ids: list[int], start: int, mark: str) -> int:
    """The first count of tokens, from `start` on, whose text ends with `mark`; `start` if there is none."""
    ends = (end for end in range(start, len(ids)) if tokenizer.decode(ids[end - 2 : end]).endswith(mark))
    return next(ends, start)


def _forks(tokenizer: Tokenizer, ids: list[int], num_prompt: int) -> list[Fork]:
    """From the prompt's end, and from each boundary on to the line's end: then a turn of its own."""
    from kda_jax.commands.forks import Fork

    def fork(boundary: int, turn: str) -> Fork:
        end = _end(tokenizer, ids, boundary + 1, "\n") if boundary < num_prompt else boundary
        return Fork(f"{boundary} + {turn!r}", boundary, ids[boundary:end] + tokenizer.encode(turn))

    early, late = BOUNDARIES
    return [fork(num_prompt, "class "), fork(late, "\n\ndef "), fork(early, "\n\nimport ")]


def _print(rows: Sequence[Row], tokenizer: Tokenizer) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table()
    table.add_column("process")
    for column in ("from", "tokens", "cold ms", "resumed ms", "checkpoint bytes", "bit-identical"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.where,
            f"{row.fork.boundary:,}",
            f"{row.fork.boundary + len(row.fork.rest):,}",
            f"{row.cold.prefill_ms:.1f}",
            f"{row.resumed.prefill_ms:.1f}",
            f"{row.checkpoint_nbytes:,}",
            "yes" if row.identical else "NO",
        )
    console.print(table)
    for row in rows:
        console.print(f"\n[bold]{row.fork.boundary} tokens, then:[/bold]")
        last = tokenizer.decode(row.fork.rest).rsplit("\n\n", 1)[-1]
        console.print(
            Text(last, style="dim") + Text(tokenizer.decode(row.resumed.tokens.tolist())), soft_wrap=True
        )
