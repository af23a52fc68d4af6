"""Notices when the machine's network changes: a cable, a Wi-Fi, a new address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from ringfort.cluster.discovery.interfaces import Choice, Interface, choose
from ringfort.cluster.discovery.system import list_interfaces

PERIOD: Final = 2.0
"""Seconds between two looks. One takes about a millisecond, and a peer that went with a cable is missed by its
heartbeats in the same time; so nothing quicker is needed, and it works the same on every system."""


async def watch_interfaces(
    current: Choice,
    wanted: Sequence[str],
    on_change: Callable[[Choice], None],
    *,
    period: float = PERIOD,
    read: Callable[[], list[Interface]] = list_interfaces,
) -> None:
    """Calls `on_change` with the new choice whenever it differs from the last, for ever: cancel it to end.

    The new choice may be without any interface, when all that were asked for are gone.
    """
    while True:
        await asyncio.sleep(period)
        choice = choose(read(), wanted, strict=False)
        if choice.interfaces != current.interfaces:
            current = choice
            on_change(choice)
