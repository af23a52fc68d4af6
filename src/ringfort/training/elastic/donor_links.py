"""`DonorLinks`: a learner's connections to its donors, of which any may be lost while one is left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ringfort.bootstrap.connection import Connection
from ringfort.errors import DistributedError, InvalidArgumentError, StateTransferError
from ringfort.training.elastic.transfer_link import TransferLink
from ringfort.transport.locks import Condition, Thread

_JOIN: Final = 5.0
"""Seconds that a thread may take to end once its connection has."""


@dataclass(eq=False)
class Source:
    """One donor."""

    link: TransferLink
    thread: Thread | None = None
    """Uses the link, while an image is fetched."""


class DonorLinks:
    """The donors that are left, and why the others are not. All methods are thread-safe."""

    def __init__(self, timeout: float) -> None:
        """A donor that has sent nothing for `timeout` seconds is lost."""
        self.lost: dict[str, str] = {}
        """Donors that were lost, and why."""
        self._timeout = timeout
        self._changed = Condition()
        self._sources: dict[str, Source] = {}
        self._is_closed = False

    @property
    def donors(self) -> tuple[str, ...]:
        """The donors that are left."""
        with self._changed:
            return tuple(self._sources)

    def add(self, peer: str, connection: Connection) -> None:
        """Take over the connection to another donor, also while an image is fetched. Raise `InvalidArgumentError` if it
        is a donor already."""
        if peer in self._sources:
            connection.close()
            raise InvalidArgumentError("peer", peer, "is a donor already")
        try:
            source = Source(TransferLink(connection, peer, self._timeout))
        except DistributedError as exc:
            self.lost[peer] = str(exc)
            return
        with self._changed:
            if self._is_closed:
                source.link.close()
                return
            self.lost.pop(peer, None)
            self._sources[peer] = source
            self._joined(source)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._changed:
            self._is_closed = True
            sources = [(source, source.thread) for source in self._sources.values()]
        for source, thread in sources:
            source.link.end()
            if thread is not None:
                thread.join(_JOIN)
            self._lose(source, "this process closed the connection")

    def _joined(self, source: Source) -> None:
        """Called with the lock held when a donor has come."""

    def _left(self, peer: str, why: str) -> None:
        """Called with the lock held when a donor is lost."""

    def _lose(self, source: Source, why: str) -> None:
        """Close the connection to a donor. Called by the thread that uses it, if there is one."""
        source.link.close()
        peer = source.link.peer
        with self._changed:
            source.thread = None
            if self._sources.get(peer) is source:
                del self._sources[peer]
                self.lost[peer] = why
                self._left(peer, why)
            self._changed.notify_all()

    def _idle_source(self, gone: Mapping[str, str], late: set[Source], step: int, deadline: float) -> Source | None:
        """Return a donor that may have the result after `step`, which those in `gone` do not have. Those in `late` did
        not have it yet: they come last, and after the deadline they are not asked again, and the answer is None. If
        none was asked yet, wait until one has sent its last blocks."""
        patience = deadline if late or gone else max(deadline, time.monotonic() + self._timeout)
        with self._changed:
            while True:
                sources = [source for peer, source in self._sources.items() if peer not in gone]
                if not sources:
                    what = f"no member is left that has the result after step {step}"
                    raise StateTransferError(what, {**self.lost, **gone})
                idle = [source for source in sources if source.thread is None]
                fresh = [source for source in idle if source not in late]
                now = time.monotonic()
                if fresh or now >= (deadline if idle else patience):
                    return fresh[0] if fresh else None
                if idle:
                    late.clear()
                    return idle[0]
                self._changed.wait(patience - now)
