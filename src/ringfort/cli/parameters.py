"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="HOST[:PORT]",
        help="Address of another machine, for networks on which it is not found by itself. Repeatable.",
    ),
]
Interfaces = Annotated[
    list[str] | None,
    typer.Option(
        "--interface",
        metavar="NAME|ADDRESS",
        help="Use only this network interface (name, address or network). Repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
