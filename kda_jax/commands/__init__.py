"""The command line: demo, generate, serve, explain, info, convert, bench. Each imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from kda_jax.commands.bench import bench
from kda_jax.commands.convert import convert
from kda_jax.commands.demo import demo, demo_resume
from kda_jax.commands.errors import USERS, one_line
from kda_jax.commands.explain import explain
from kda_jax.commands.generate import generate
from kda_jax.commands.info import info
from kda_jax.commands.serve import serve

TRACEBACK = "--traceback"
app = typer.Typer(
    help=f"Kimi Linear in JAX, with states that resume exactly. {TRACEBACK} shows where an error came from.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, generate, serve, explain, info, convert):
    app.command()(command)
app.add_typer(bench, name="bench")
app.command(hidden=True)(demo_resume)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line, without the program's name.

    Returns:
        The exit code: 0, 1 for a mistake that one line on stderr names, 2 for one in the command line itself.
    """
    left = [argument for argument in arguments if argument != TRACEBACK]
    try:
        return typer.main.get_command(app).main(left, prog_name="kda_jax", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        sys.stdout = None
        return 1
    except Exception as error:
        usage = getattr(error, "format_message", None)  # typer's and click's own errors have it
        if usage is None and (len(left) < len(arguments) or not isinstance(error, USERS)):
            raise
        print(f"kda_jax: {' '.join(usage().split()) if usage else one_line(error)}", file=sys.stderr)
        return getattr(error, "exit_code", 1) if usage else 1
