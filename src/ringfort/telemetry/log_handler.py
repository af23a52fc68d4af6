"""Lines that a user should see while a program runs, although the program has not set up logging."""

from __future__ import annotations

import logging


def show_lines(logger: str) -> None:
    """Print what `logger` reports from level INFO on, unless the program sets up logging itself."""
    shown = logging.getLogger(logger)
    if shown.handlers or shown.level != logging.NOTSET:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda _: not logging.getLogger().handlers)  # the program may set up logging later
    shown.addHandler(handler)
    shown.setLevel(logging.INFO)
