"""`python -m transfer`: the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from transfer.errors import TransferError
from transfer.mooncake.up import up

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(up)


@app.callback()
def commands() -> None:
    """Checkpoints to another process or tier."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command line, without the program's name.

    Returns:
        The exit code: 0, 1 for what one line on stderr names, 2 for a mistake in the command line itself.
    """
    try:
        return (
            typer.main.get_command(app).main(list(arguments), prog_name="transfer", standalone_mode=False)
            or 0
        )
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (TransferError, ValueError) as error:
        print(f"transfer: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        usage = getattr(error, "format_message", None)  # typer's and click's own errors have it
        if usage is None:
            raise
        print(f"transfer: {' '.join(usage().split())}", file=sys.stderr)
        return getattr(error, "exit_code", 1)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
