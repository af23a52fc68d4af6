"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

from typer import Option

Peers = Annotated[
    list[str] | None,
    Option(
        "--peer",
        metavar="HOST[:PORT]",
        help="Address of another machine, for networks on which it is not found by itself. Repeatable.",
    ),
]
Interfaces = Annotated[
    list[str] | None,
    Option(
        "--interface",
        metavar="NAME|ADDRESS",
        help="Use only this network interface (name, address or network). Repeatable.",
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON document.")]
