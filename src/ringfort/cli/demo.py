"""`ringfort demo`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

from typer import Exit, Option

from ringfort.cli.outcome import EXIT_FAILED, print_json
from ringfort.demo.settings import RANKS, STEPS, Settings
from ringfort.errors import BackendUnavailableError


def demo(
    ranks: Annotated[int, Option(help="Processes to train with. From 3 on, one is killed and comes back.")] = RANKS,
    steps: Annotated[
        int | None, Option(help=f"Training steps: {STEPS['torch']} with torch, {STEPS['numpy']} without.")
    ] = None,
    seed: Annotated[int, Option(help="Seed of the initial weights and of the order of the samples.")] = 0,
    framework: Annotated[
        str | None, Option(help="torch (a transformer) or numpy (a smaller model).  [default: torch if installed]")
    ] = None,
    live: Annotated[bool, Option("--live/--no-live", help="Draw a live table in a terminal.")] = True,
    json_: Annotated[bool, Option("--json", help="Print one JSON document; progress goes to standard error.")] = False,
) -> None:
    """Train a small language model with several processes of this machine, kill one of them, and let it come back."""
    has_torch = find_spec("torch") is not None
    chosen: Any = framework or ("torch" if has_torch else "numpy")
    settings = Settings(ranks, STEPS.get(chosen, 1) if steps is None else steps, seed, chosen)
    if chosen == "torch" and not has_torch:
        raise BackendUnavailableError("torch", "pip install 'ringfort[torch]'")

    from rich.console import Console

    from ringfort.demo.run import run_demo

    console = Console(stderr=json_)
    outcome = run_demo(settings, console, live=live and console.is_terminal)
    if json_:
        print_json(outcome.to_dict())
    if not outcome.passed:
        raise Exit(EXIT_FAILED)
