"""The command line: one file a verb, and each imports what it needs only when it runs."""

from __future__ import annotations

from ringfort.cli.app import app, main

__all__ = ["app", "main"]
