"""Watches for changes of the machine's network: a cable, another Wi-Fi, a new address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from ringfort.cluster.discovery.interfaces import Choice, Interface, choose
from ringfort.cluster.discovery.system import list_interfaces

PERIOD: Final = 2.0
"""Seconds between two checks. A check takes about a millisecond and works on every system; heartbeats notice a lost
peer in the same time."""


async def watch_interfaces(
    current: Choice,
    wanted: Sequence[str],
    on_change: Callable[[Choice], None],
    *,
    period: float = PERIOD,
    read: Callable[[], list[Interface]] = list_interfaces,
) -> None:
    """Call `on_change` with the new choice whenever it changes, until cancelled.

    The new choice may contain no interface if all that were asked for are gone.
    """
    while True:
        await asyncio.sleep(period)
        choice = choose(read(), wanted, strict=False)
        if choice.interfaces != current.interfaces:
            current = choice
            on_change(choice)
