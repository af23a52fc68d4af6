"""`OtherRuns`: the programs of other runs that have this run's name. They are told apart here, and told so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from math import inf
from threading import Lock
from typing import Final, NamedTuple

from ringfort.cluster.core.events import ClusterEvent, Noted, PeerJoined, PeerLost
from ringfort.errors import DistributedError
from ringfort.training.elastic.protocol import Mark, lineage_of
from ringfort.training.elastic.run_note import TOPIC, RunNote, at, differences, read

_log = logging.getLogger("ringfort.elastic")

_MOST: Final = 1024
"""Peers whose notes are kept."""
_AGAIN: Final = 1.0
"""Seconds after which peers are told again which run this is: those of other runs come without an event."""
_YOUNG: Final = 60.0
"""Seconds after the start of a program; later it is `_SELDOM` that it tells."""
_SELDOM: Final = 15.0


class Place(NamedTuple):
    """Where a program is."""

    mark: Mark
    is_copy: bool = False
    """It has only copied this state, and is no member of the run yet."""
    ended: tuple[str, ...] = ()
    """The lineages that its last epoch knows to have ended."""


class OtherRuns:
    """Keeps what other programs have told. `on_event` is for the node's callback thread, the rest for the program's.

    Of two runs of one name, the one with more sealed steps stays: `RunNote.rank`. Each side compares what it was told
    with where it is itself, which only grows, so at most one of them gives way.
    """

    def __init__(
        self,
        mine: RunNote,
        where: Callable[[], Place],
        tell: Callable[[bytes, str | None], None],
        now: float,
    ) -> None:
        """`where` returns where this program is, and `tell` sends a note to a peer or to all."""
        self._mine = mine
        self._where = where
        self._tell = tell
        self._lock = Lock()
        self._notes: dict[str, RunNote] = {}
        self._begun_at = now
        self._told_at = -inf
        self._is_alone: str | None = None
        """The branch at which no note of another run or branch was found, until the next note: this is asked in every
        step."""
        self._warned: set[str] = set()

    def announce(self, now: float) -> None:
        """Tell all peers which run this is, unless they were told a moment ago."""
        if now < self._told_at + _AGAIN:
            return
        is_young = now < self._begun_at + _YOUNG or self._others()
        if is_young or now >= self._told_at + _SELDOM:
            self._told_at = now
            self._send(None, is_answer=False)

    def on_event(self, event: ClusterEvent) -> None:
        """Take an event of the cluster."""
        match event:
            case PeerJoined(peer=peer):
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
                        self._is_alone = None
                if not note.is_answer:
                    self._send(peer, is_answer=True)
                why = differences(self._mine, note)
                if why and note.run not in self._warned and len(self._warned) < _MOST:
                    self._warned.add(note.run)
                    _log.warning("The run %r of %s is another one: %s", note.name, note.machine or peer, why)
            case _:
                pass

    def different(self) -> str:
        """Return in words what differs from a run of this name with other data or another state, if that one stays;
        empty if there is none."""
        for peer, note in self._others().items():
            if note.run != self._mine.run and note.rank > self._rank():
                return f"{note.machine or peer} has a run of this name that differs: {differences(self._mine, note)}"
        return ""

    def better(self) -> tuple[str, ...]:
        """Return the peers of this run that follow a branch with more sealed steps, which was founded apart. Not those
        that have only copied its state or whose run has ended: nobody continues that, so nobody can give way to it."""
        others = self._others()
        if not others:
            return ()
        (mark, _, ended), rank = self._where(), self._rank()
        branch = mark.branch
        return tuple(
            [
                peer
                for peer, note in others.items()
                if branch and note.run == self._mine.run and note.branch not in ("", branch)
                if note.rank > rank and not note.is_copy and lineage_of(note.branch) not in ended
            ]
        )

    def _rank(self) -> tuple[int, str]:
        mark = self._where().mark
        return mark.step, mark.branch or self._mine.run

    def _others(self) -> dict[str, RunNote]:
        branch = self._where().mark.branch
        with self._lock:
            if self._is_alone == branch:
                return {}
            found = {p: n for p, n in self._notes.items() if n.run != self._mine.run or n.branch != branch}
            self._is_alone = None if found else branch
            return found

    def _send(self, peer: str | None, *, is_answer: bool) -> None:
        mark, is_copy, _ = self._where()
        with suppress(DistributedError):  # the peer has gone, or this node is closing
            self._tell(at(self._mine, mark, is_answer=is_answer, is_copy=is_copy), peer)
