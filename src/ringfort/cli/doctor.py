"""`ringfort doctor`: what keeps this machine from its cluster, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ringfort.cli.outcome import EXIT_FAILED, errors_as_lines

if TYPE_CHECKING:
    from ringfort.cluster.diagnosis.checks import Check


def doctor(
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST[:PORT]", help="A peer to connect to; may be given more than once."),
    ] = None,
    interface: Annotated[
        list[str] | None,
        typer.Option(help="An interface by name, address or network, in place of all useful ones; may be repeated."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check this machine and the way to its cluster, and say how to mend what is wrong."""
    with errors_as_lines():
        import asyncio

        from ringfort.cluster.diagnosis.checks import Outcome, run_checks
        from ringfort.cluster.diagnosis.findings import gather_findings
        from ringfort.config import Environment

        told = Environment.from_mapping()
        wanted, peers = interface or _listed(told.interfaces), peer or _listed(told.peers)
        checks = run_checks(asyncio.run(gather_findings(wanted, peers)))
        if json_:
            _print_json(checks)
        else:
            _print_table(checks)
        if any(check.outcome is Outcome.FAIL for check in checks):
            raise typer.Exit(EXIT_FAILED)


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _print_json(checks: list[Check]) -> None:
    import json

    rows = [
        {"check": check.name, "outcome": check.outcome.value, "what": check.what, "fix": check.fix} for check in checks
    ]
    typer.echo(json.dumps({"checks": rows}, sort_keys=True))


def _print_table(checks: list[Check]) -> None:
    """Aligned and coloured in a terminal; elsewhere a line for each, however long, for `grep` and mail."""
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
