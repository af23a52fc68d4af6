"""`DonorSearch`: opens streams from a learner to the members of its run: to all at once, and to later ones too."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final, Protocol

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.state_sources import StateSource
from ringfort.errors import DistributedError
from ringfort.training.elastic.donor_links import DonorLinks
from ringfort.training.elastic.timeline import note
from ringfort.transport.locks import Condition, Thread

_log = logging.getLogger(__name__)


_LOOK: Final = 1.0
"""Seconds between two looks for other members, if no event comes before."""


class Sources(Protocol):
    """Knows the members that may send the state: a `Membership`."""

    @property
    def news(self) -> int:
        """The number of events so far."""
        ...

    def wait_for_news(self, seen: int, seconds: float) -> None:
        """Wait for an event beyond the first `seen`, for so many seconds."""
        ...

    def sources(self) -> Sequence[StateSource]:
        """Return the members that may send the state."""
        ...

    def open_stream(self, peer: str) -> Connection:
        """Return a stream to a member. Raise `DistributedError` within seconds if that fails."""
        ...


class DonorSearch:
    """Adds donors to a learner, in threads: a member that is frozen does not answer, and others may come later."""

    def __init__(self, links: DonorLinks, members: Sources) -> None:
        self._links = links
        self._members = members
        self._changed = Condition()
        self._opening: set[str] = set()
        self._is_over = False

    def start(self, sources: Sequence[StateSource]) -> None:
        """Begin with these, and look for others until `close`."""
        seen = self._members.news
        self._look(sources)
        Thread(self._watch, (seen,), name="ringfort-donor-search").start()

    def close(self) -> None:
        """Look no more. What is open belongs to the learner."""
        self._is_over = True

    def has_found(self, seconds: float) -> bool:
        """Return whether there is a donor, after waiting for the first one for so many seconds at most."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._opening and not self._links.donors and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        return bool(self._links.donors)

    def _watch(self, seen: int) -> None:
        while not self._is_over:
            self._members.wait_for_news(seen, _LOOK)
            seen = self._members.news
            try:
                if not self._is_over:
                    self._look(self._members.sources())
            except DistributedError as exc:  # this node is closing
                _log.info("Cannot look for members: %s", exc)
                return

    def _look(self, sources: Sequence[StateSource]) -> None:
        """Begin to open streams to those of `sources` that were not tried yet, and return."""
        for source in sources:
            peer = source.peer
            with self._changed:
                if peer in self._opening or peer in self._links.donors or peer in self._links.lost:
                    continue
                self._opening.add(peer)
            Thread(self._open, (peer,), name="ringfort-donor-search").start()

    def _open(self, peer: str) -> None:
        try:
            self._links.add(peer, self._members.open_stream(peer))
            note("stream to %s open", peer)
        except DistributedError as exc:
            self._links.lost[peer] = str(exc)
            _log.info("%s cannot send the state: %s", peer, exc)
        finally:
            with self._changed:
                self._opening.discard(peer)
                self._changed.notify_all()
