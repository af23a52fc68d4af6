"""`ringfort doctor`: what keeps this machine from its cluster, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ringfort.cli.outcome import EXIT_FAILED, errors_as_lines

if TYPE_CHECKING:
    from ringfort.cluster.doctor import Check


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
    """Check interfaces, multicast, ports, peers, firewall, MTU, key, version and clock, and say how to mend them."""
    with errors_as_lines():
        import asyncio

        from ringfort.cluster.doctor import Outcome, examine
        from ringfort.cluster.symptoms import look
        from ringfort.config import Environment

        told = Environment.from_mapping()
        checks = examine(asyncio.run(look(interface or _listed(told.interfaces), peer or _listed(told.peers))))
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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"pass": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    before = ""
    for check in checks:
        outcome = check.outcome.value
        what = Text(check.what)
        if check.fix:
            what.append(f"\nfix: {check.fix}", style="bold")
        table.add_row(Text(check.name if check.name != before else ""), Text(outcome, style=colours[outcome]), what)
        before = check.name
    Console().print(table)
