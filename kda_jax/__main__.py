"""`python -m kda_jax`: the command line."""

from __future__ import annotations

import sys

from kda_jax.commands import run


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
