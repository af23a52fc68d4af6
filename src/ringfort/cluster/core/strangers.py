"""Machines of other clusters that announce themselves on this network: when to tell the program, and in which words.
Pure. A machine that was given no join code, or an old one, is in a cluster of its own: the likeliest first mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

ALONE_SECONDS: Final = 2.5
"""How long a peer may wait for others before it is told: peers that can meet need less than one second, and a person
should know within three."""
MAX_TOLD: Final = 4
"""Times that one peer is told. Anybody on the network may announce anything, and could fill a log with it."""
MAX_NAMED: Final = 4
"""Addresses in one sentence."""

HOW_TO_JOIN: Final = "`ringfort key show` on one machine, `ringfort key join CODE` on the others"
"""Not "there" and "here": machines of two clusters both read this, and must not change places."""


def other_clusters(machines: Sequence[str]) -> str:
    """How many machines of other clusters are here, and where: an address for each."""
    if not machines:
        return "no machine of another cluster announces itself here"
    more = f" and {len(machines) - MAX_NAMED} more" if len(machines) > MAX_NAMED else ""
    where = f"{', '.join(machines[:MAX_NAMED])}{more}"
    if len(machines) == 1:
        return f"1 machine of another cluster announces itself here ({where})"
    return f"{len(machines)} machines of other clusters announce themselves here ({where})"


class StrangerWatch:
    """Decides when a peer that waits for others is told about machines of other clusters."""

    def __init__(self) -> None:
        self._waiting_since: float | None = None
        self._known: set[str] = set()
        self._told = 0

    def look(self, now: float, machines: Sequence[str], *, is_waiting: bool) -> bool:
        """Whether to tell of `machines` now: the peer has waited long enough, and one of them is new."""
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
