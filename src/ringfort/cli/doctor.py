"""`ringfort doctor`: finds what keeps this machine from its cluster, and says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ringfort.cli.outcome import EXIT_FAILED, print_json
from ringfort.cli.parameters import AsJson, Interfaces, Peers

if TYPE_CHECKING:
    from ringfort.cluster.diagnosis.checks import Check


def doctor(peer: Peers = None, interface: Interfaces = None, json_: AsJson = False) -> None:
    """Check this machine and its connections to the cluster, and say how to fix what is wrong."""
    import asyncio

    from ringfort.cluster.diagnosis.checks import Outcome, run_checks
    from ringfort.cluster.diagnosis.findings import gather_findings
    from ringfort.config import Environment

    told = Environment.from_mapping()
    checks = run_checks(asyncio.run(gather_findings(interface or told.interfaces, peer or told.contacts)))
    if json_:
        rows = [{"check": one.name, "outcome": one.outcome.value, "what": one.what, "fix": one.fix} for one in checks]
        print_json({"checks": rows})
    else:
        _print_table(checks)
    if any(check.outcome is Outcome.FAIL for check in checks):
        raise typer.Exit(EXIT_FAILED)


def _print_table(checks: list[Check]) -> None:
    """Print a coloured table in a terminal; elsewhere one line per check, for `grep` and mail."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        for check in checks:
            fix = f" (fix: {check.fix})" if check.fix else ""
            typer.echo(f"{check.name:<11} {check.outcome.value:<8} {check.what}{fix}")
        return
    colours = {"pass": "green", "warn": "yellow", "fail": "bold red", "unknown": "cyan"}
    table = Table(box=None, pad_edge=False, show_header=False)
    before = ""
    for check in checks:
        outcome = check.outcome.value
        what = Text(check.what)
        if check.fix:
            what.append(f"\nfix: {check.fix}", style="bold")
        table.add_row(Text(check.name if check.name != before else ""), Text(outcome, style=colours[outcome]), what)
        before = check.name
    console.print(table)
