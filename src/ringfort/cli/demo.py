"""`ringfort demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from ringfort.cli.outcome import EXIT_FAILED, errors_as_lines
from ringfort.demo.settings import RANKS, STEPS, Settings


def demo(
    ranks: Annotated[int, typer.Option(help="Local peers to train with.")] = RANKS,
    steps: Annotated[int, typer.Option(help="Training steps.")] = STEPS,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of the samples.")] = 0,
    live: Annotated[bool, typer.Option("--live/--no-live", help="Draw a live table if this is a terminal.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document, and progress to stderr.")] = False,
) -> None:
    """Train a small language model with local peers."""
    with errors_as_lines():
        settings = Settings(ranks=ranks, steps=steps, seed=seed)

        from rich.console import Console

        from ringfort.demo.run import run_demo

        console = Console(stderr=json_)
        outcome = run_demo(settings, console, live=live and console.is_terminal)
        if json_:
            import json

            typer.echo(json.dumps(outcome.to_dict(), sort_keys=True))
        if not outcome.passed:
            raise typer.Exit(EXIT_FAILED)
