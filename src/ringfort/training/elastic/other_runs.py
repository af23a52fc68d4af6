"""`OtherRuns`: the programs of other runs that have this run's name. They are told apart here, and told so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Final

from ringfort.cluster.core.events import ClusterEvent, Noted, PeerJoined, PeerLost
from ringfort.errors import DistributedError
from ringfort.training.elastic.protocol import Mark
from ringfort.training.elastic.run_note import TOPIC, RunNote, at, differences, read

_log = logging.getLogger("ringfort.elastic")

_MOST: Final = 1024
"""Peers whose notes are kept."""
_AGAIN: Final = 2.0
"""Seconds after which peers that are elsewhere are told again how far this run is."""


class OtherRuns:
    """Keeps what other programs have told. `on_event` is for the node's callback thread, the rest for the program's.

    Of two runs of one name, the one with more sealed steps stays: `RunNote.rank`. Each side compares what it was told
    with where it is itself, which only grows, so at most one of them gives way.
    """

    def __init__(self, mine: RunNote, where: Callable[[], Mark], tell: Callable[[bytes, str | None], None]) -> None:
        """`where` returns where this program is, and `tell` sends a note to a peer or to all."""
        self._mine = mine
        self._where = where
        self._tell = tell
        self._lock = Lock()
        self._notes: dict[str, RunNote] = {}
        self._names: dict[str, str] = {}
        self._told_at = 0.0
        self._warned: set[str] = set()

    def announce(self, now: float) -> None:
        """Tell all peers which run this is."""
        self._told_at = now
        self._send(None, is_answer=False)

    def remind(self, now: float) -> None:
        """Tell others again, if there are any that follow another branch."""
        if now >= self._told_at + _AGAIN and self._others():
            self.announce(now)

    def on_event(self, event: ClusterEvent) -> None:
        """Take an event of the cluster."""
        match event:
            case PeerJoined(peer=peer, name=name):
                self._names[peer] = name
                self._send(peer, is_answer=False)
            case PeerLost(peer=peer):
                with self._lock:
                    self._notes.pop(peer, None)
            case Noted(peer=peer, topic=topic, body=body) if topic == TOPIC:
                note = read(body)
                if note is None or note.name != self._mine.name:
                    return
                with self._lock:
                    if peer in self._notes or len(self._notes) < _MOST:
                        self._notes[peer] = note
                if not note.is_answer:
                    self._send(peer, is_answer=True)
                why = differences(self._mine, note)
                if why and peer not in self._warned and len(self._warned) < _MOST:
                    self._warned.add(peer)
                    _log.warning("The run %r of %s is another one: %s", note.name, self._name(peer), why)
            case _:
                pass

    def different(self) -> str:
        """Return in words what differs from a run of this name with other data or another state, if that one stays;
        empty if there is none."""
        mine = self._rank()
        for peer, note in self._others().items():
            if note.run != self._mine.run and note.rank > mine:
                return f"{self._name(peer)} has a run of this name that differs: {differences(self._mine, note)}"
        return ""

    def better(self) -> tuple[str, ...]:
        """Return the peers of this run that follow a branch with more sealed steps, which was founded apart."""
        branch, rank = self._where().branch, self._rank()
        return tuple(
            [
                peer
                for peer, note in self._others().items()
                if branch and note.run == self._mine.run and note.branch not in ("", branch) and note.rank > rank
            ]
        )

    def _rank(self) -> tuple[int, str]:
        mark = self._where()
        return mark.step, mark.branch or self._mine.run

    def _others(self) -> dict[str, RunNote]:
        branch = self._where().branch
        with self._lock:
            return {p: n for p, n in self._notes.items() if n.run != self._mine.run or n.branch != branch}

    def _send(self, peer: str | None, *, is_answer: bool) -> None:
        with suppress(DistributedError):  # the peer has gone, or this node is closing
            self._tell(at(self._mine, self._where(), is_answer=is_answer), peer)

    def _name(self, peer: str) -> str:
        return self._names.get(peer) or peer
