"""`ringfort demo`."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from typing import Annotated, Any, Final

from typer import Exit, Option, echo

from ringfort.cli.dash import check_extra
from ringfort.cli.outcome import EXIT_FAILED, print_json
from ringfort.demo.settings import RANKS, STEPS, Settings
from ringfort.errors import BackendUnavailableError

_LOOK: Final = 0.1
"""Seconds between two looks whether somebody has opened the page."""


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
    web: Annotated[bool, Option("--web", help="Show it in a browser too: prints a link for this machine.")] = False,
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
    with _page() if web else nullcontext():
        outcome = run_demo(settings, console, live=live and console.is_terminal)
    if json_:
        print_json(outcome.to_dict())
    if not outcome.passed:
        raise Exit(EXIT_FAILED)


@contextmanager
def _page() -> Generator[None]:
    """Serve the page of `ringfort dash` inside. In a terminal, wait for a browser before and for Ctrl-C after: the demo
    takes less time than a person needs to look."""
    check_extra()

    from ringfort.dashboard.source import LiveSource
    from ringfort.dashboard.web.security import LINK_SECONDS
    from ringfort.dashboard.web.server import DashServer

    waits = sys.stdin.isatty()
    with LiveSource(only_here=True) as source, DashServer(source, run="demo") as server:
        echo(f"open this link in a browser on this machine within {LINK_SECONDS:.0f} s; it works once:", err=True)
        echo(f"  {server.new_link()}", err=True)
        if waits:
            echo("the demo begins when the page is open", err=True)
            deadline = time.monotonic() + LINK_SECONDS
            while not server.has_viewer and time.monotonic() < deadline:
                time.sleep(_LOOK)
        yield
        if waits and server.has_viewer:
            echo("the page stays; Ctrl-C ends", err=True)
            with suppress(KeyboardInterrupt):
                while server.is_serving:
                    time.sleep(_LOOK)
