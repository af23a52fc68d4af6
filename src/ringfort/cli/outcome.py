"""How a command ends: exit codes, errors as one line instead of a traceback, and results as JSON."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from ringfort.errors import DistributedError, InvalidArgumentError

EXIT_FAILED = 1
EXIT_BAD_ARGUMENT = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


class Commands(TyperGroup):
    """Commands whose errors are one line: Ringfort's own errors, and Ctrl-C, become a line and an exit code."""

    def invoke(self, ctx: Any) -> object:
        """Run the command that was typed."""
        try:
            return super().invoke(ctx)
        except InvalidArgumentError as exc:
            raise _end(f"error: {exc}", EXIT_BAD_ARGUMENT) from exc
        except DistributedError as exc:
            raise _end(f"error: {exc}", EXIT_FAILED) from exc
        except KeyboardInterrupt as exc:
            raise _end("interrupted", EXIT_INTERRUPTED) from exc


def print_json(document: object) -> None:
    """Print a JSON document with sorted keys."""
    import json

    typer.echo(json.dumps(document, sort_keys=True))


def _end(line: str, code: int) -> typer.Exit:
    typer.echo(line, err=True)
    return typer.Exit(code)
