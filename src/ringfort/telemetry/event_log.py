"""`EventLog`: the latest events of a run, in bounded memory. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from ringfort.telemetry.view import ShownEvent

MAX_EVENTS: Final = 200
SAME_EVENT: Final = 5.0
"""Seconds within which the same event, told by several ranks, is shown once."""


class Teller(NamedTuple):
    """Who tells of an event; by default the viewer itself."""

    host: str = ""
    key: str = ""
    """The process, as in `RankView.key`."""


class EventLog:
    """Keeps `MAX_EVENTS`. When there are more, the machine that tells of the most events loses the oldest one of its
    process that tells of the most: a rank that floods the log pushes out its own events, and not another's loss."""

    def __init__(self) -> None:
        self._events: list[tuple[Teller, ShownEvent]] = []
        self._hosts: Counter[str] = Counter()
        """How many events each machine tells of, and each teller."""
        self._tellers: Counter[Teller] = Counter()

    def add(self, event: ShownEvent, teller: Teller = Teller()) -> None:  # noqa: B008
        """Add an event, unless another rank has just told it."""
        for _, other in reversed(self._events):
            if event.at - other.at > SAME_EVENT:
                break
            if (other.kind, other.text) == (event.kind, event.text):
                return
        self._events.append((teller, event))
        self._count(teller, 1)
        if len(self._events) > MAX_EVENTS:
            self._drop()

    def _drop(self) -> None:
        host = max(self._hosts, key=self._hosts.__getitem__)
        most = max((one for one in self._tellers if one.host == host), key=self._tellers.__getitem__)
        del self._events[next(place for place, (teller, _) in enumerate(self._events) if teller == most)]
        self._count(most, -1)

    def _count(self, teller: Teller, change: int) -> None:
        self._hosts[teller.host] += change
        self._tellers[teller] += change
        if not self._hosts[teller.host]:
            del self._hosts[teller.host]
        if not self._tellers[teller]:
            del self._tellers[teller]

    def all(self) -> tuple[ShownEvent, ...]:
        """Return the events, oldest first."""
        return tuple(event for _, event in self._events)
