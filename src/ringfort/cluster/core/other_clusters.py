"""Machines of other clusters on the same network: when to mention them to the program, and how. Pure.

A machine that was given no join code, or an old one, forms a cluster of its own. It is the most likely first mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

ALONE_SECONDS: Final = 2.5
"""Seconds that a peer waits for others before it mentions other clusters. Peers that can connect need less than one
second, and a person should be told within three."""
MAX_TOLD: Final = 4
"""Times that other clusters are mentioned: anyone on the network can announce anything, and could fill a log."""
MAX_NAMED: Final = 4
"""Addresses in one message."""

HOW_TO_JOIN: Final = "`ringfort key show` on one machine, `ringfort key join CODE` on the others"
"""Not "there" and "here": machines of both clusters print this, and only one of them should change."""


def describe_other_clusters(machines: Sequence[str]) -> str:
    """Return how many machines of other clusters announce themselves, with their addresses."""
    if not machines:
        return "no machine of another cluster announces itself here"
    more = f" and {len(machines) - MAX_NAMED} more" if len(machines) > MAX_NAMED else ""
    those = f"{len(machines)} machines of other clusters announce themselves"
    what = "1 machine of another cluster announces itself" if len(machines) == 1 else those
    return f"{what} here ({', '.join(machines[:MAX_NAMED])}{more})"


class OtherClusterWatch:
    """Decides when a peer that waits for others is told about machines of other clusters."""

    def __init__(self) -> None:
        self._waiting_since: float | None = None
        self._known: set[str] = set()
        self._told = 0

    def look(self, now: float, machines: Sequence[str], *, is_waiting: bool) -> bool:
        """Return whether to mention `machines` now: the peer has waited long enough, and at least one is new."""
        if not is_waiting:
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < ALONE_SECONDS or self._told >= MAX_TOLD or self._known.issuperset(machines):
            return False
        self._known.update(machines)
        self._told += 1
        return True
