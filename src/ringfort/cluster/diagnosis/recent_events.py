"""`RecentEvents`: what a node keeps of past events in order to explain later why it is alone. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

from ringfort.cluster.core import events

MAX_EVENTS: Final = 8
"""Events of each kind that are kept."""


class RecentEvents:
    """Feed it every event."""

    def __init__(self) -> None:
        self.refused: deque[str] = deque(maxlen=MAX_EVENTS)
        """The latest peers that were refused, each in a sentence."""
        self.lost: dict[str, str] = {}
        """The latest peers that were lost: the name of each, and why."""
        self.waiting_for = ""
        """Why there is no epoch, as the core last said."""
        self._names: dict[str, str] = {}

    def add(self, event: events.ClusterEvent) -> None:
        """Take note of an event."""
        match event:
            case events.PeerJoined(peer=peer, name=name):
                self._names[peer] = name
                self.lost.pop(peer, None)
            case events.PeerLost(peer=peer, why=why):
                self.lost[peer] = f"{self._names.pop(peer, '') or peer} ({why})"
                while len(self.lost) > MAX_EVENTS:
                    del self.lost[next(iter(self.lost))]
            case events.EpochStarted():
                self.waiting_for = ""
            case events.Waiting(why=why):
                self.waiting_for = why
            case events.CloneFound() | events.Misbehaved() if str(event) not in self.refused:
                self.refused.append(str(event))
            case _:
                pass
