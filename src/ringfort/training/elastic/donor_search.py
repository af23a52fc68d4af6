"""`DonorSearch`: opens streams from a learner to the members of its run: to all at once, and to later ones too."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.state_sources import StateSource
from ringfort.errors import DistributedError
from ringfort.training.elastic.donor_links import DonorLinks
from ringfort.training.elastic.timeline import note
from ringfort.transport.locks import Condition, Thread

_log = logging.getLogger(__name__)


class DonorSearch:
    """Adds donors to a learner. Each stream is opened in a thread, because a member that is frozen does not answer."""

    def __init__(self, links: DonorLinks, open_stream: Callable[[str], Connection]) -> None:
        """`open_stream` returns a stream to a peer, or raises `DistributedError` within seconds."""
        self._links = links
        self._open_stream = open_stream
        self._changed = Condition()
        self._opening: set[str] = set()

    def look(self, sources: Sequence[StateSource]) -> None:
        """Begin to open streams to those of `sources` that were not tried yet, and return."""
        for source in sources:
            peer = source.peer
            with self._changed:
                if peer in self._opening or peer in self._links.donors or peer in self._links.lost:
                    continue
                self._opening.add(peer)
            Thread(self._open, (peer,), name="ringfort-donor-search").start()

    def has_found(self, seconds: float) -> bool:
        """Return whether there is a donor, after waiting for the first one for so many seconds at most."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._opening and not self._links.donors and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        return bool(self._links.donors)

    def _open(self, peer: str) -> None:
        try:
            self._links.add(peer, self._open_stream(peer))
            note("stream to %s open", peer)
        except DistributedError as exc:
            self._links.lost[peer] = str(exc)
            _log.info("%s cannot send the state: %s", peer, exc)
        finally:
            with self._changed:
                self._opening.discard(peer)
                self._changed.notify_all()
