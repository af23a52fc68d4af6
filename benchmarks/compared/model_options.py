"""What the model of a comparison is, on the command lines of all systems alike."""

from __future__ import annotations

import argparse

WIDTH = 128
LAYERS = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the model is to a command line."""
    add = parser.add_argument
    add("--width", type=int, default=WIDTH, help="of the model [%(default)s]")
    add("--layers", type=int, default=LAYERS, help="of the model [%(default)s]")
    add("--pause", type=float, default=0.0, metavar="MS", help="milliseconds that each sample also waits, as for a "
        "device of this member's own: so the processor does not decide [%(default)g]")  # fmt: skip


def options_of(given: argparse.Namespace) -> list[str]:
    """Return the words that hand these options on."""
    return ["--width", str(given.width), "--layers", str(given.layers), "--pause", str(given.pause)]
