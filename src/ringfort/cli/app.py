"""The `ringfort` command and its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from ringfort.cli.bench import bench
from ringfort.cli.checkpoint import checkpoint
from ringfort.cli.dash import dash
from ringfort.cli.demo import demo
from ringfort.cli.doctor import doctor
from ringfort.cli.key import key
from ringfort.cli.outcome import Commands
from ringfort.cli.peers import peers
from ringfort.cli.run import run
from ringfort.cli.top import top
from ringfort.cli.trace import trace
from ringfort.cli.witness import witness

# Plain help and errors: an error is one line that a log or another program can read, not a box or a traceback.
app = typer.Typer(
    name="ringfort",
    cls=Commands,
    help="Train one model across the machines you already own.",
    invoke_without_command=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(bench)
# Everything after the script belongs to the script, options too.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(peers)
app.command()(top)
app.command()(trace)
app.command()(dash)
app.command()(doctor)
app.command()(witness)
app.add_typer(key, name="key")
app.add_typer(checkpoint, name="checkpoint")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"ringfort {version('ringfort')}")
        raise typer.Exit


FIRST_STEPS = """Train one model across the machines you already own.
The first five commands, in order:

  ringfort demo                     on one machine: train with three processes
  ringfort key show                 on the first machine: print a join code
  ringfort key join                 on each other machine: enter the code
  ringfort run --nodes 2 train.py   on each machine: run your program on all
  ringfort doctor                   if they do not find each other: say why

See also `ringfort top` and `ringfort dash` (watch a run), `ringfort peers`
(list the machines), `ringfort bench` (measure), `ringfort --help` and
`ringfort COMMAND --help`."""


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train one model across the machines you already own."""
    del version  # its callback printed it
    if context.invoked_subcommand is None:
        typer.echo(FIRST_STEPS)


def main() -> None:
    """The entry point of the `ringfort` script."""
    app()
