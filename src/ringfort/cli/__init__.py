"""The command line: one file per command, each of which imports what it needs only when it runs."""

from __future__ import annotations

from ringfort.cli.app import app, main

__all__ = ["app", "main"]
