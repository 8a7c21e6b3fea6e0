"""`python -m pallas_kernels`."""

import typer

from pallas_kernels.check.command import check

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command("check")(check)


@app.callback()
def commands() -> None:
    """The kernels of kda-jax."""


if __name__ == "__main__":
    app()
