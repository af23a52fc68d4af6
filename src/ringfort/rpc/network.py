"""`Network`: the connections of one agent, and how they begin and end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ringfort.rpc.link import Link, LoopbackLink, PeerLink
from ringfort.rpc.outbound import Outgoing
from ringfort.rpc.poller import Poller
from ringfort.rpc.protocol import Event, Head, pack_goodbye
from ringfort.rpc.setup import Formed
from ringfort.transport import locks, tcp
from ringfort.transport.forks import FORKED, keep_from_children

CLOSED = "this agent is closed"
_FAREWELL = 1.0
"""Seconds that closing gives the last frames to leave."""


class Network:
    """A link to each rank, and the thread that reads them all."""

    def __init__(
        self,
        rank: int,
        formed: Formed,
        *,
        admit: Callable[[PeerLink, Head], bool],
        on_event: Callable[[PeerLink, Event], None],
        on_lost: Callable[[int], None],
        expire: Callable[[float], float],
        is_running: Callable[[], bool],
    ) -> None:
        """The callbacks run in the agent's thread or in that of a caller that leads, `on_lost` and `expire` in the
        agent's alone: see `Poller`. No callback runs before `start`."""
        self.closed: str | None = None
        """Why nothing can be sent any more, once the agent closes."""
        self.lost: dict[int, str] = {}
        """The ranks that have closed their agent or are lost, and why."""
        self.all_lost = locks.Event()
        self.is_over = False
        self.closing = threading.RLock()
        self._on_lost, self._expire = on_lost, expire
        self._patience, self._look_at = formed.patience, 0.0
        self.poller = Poller(f"ringfort-rpc-{rank}", on_event, self._on_link_lost, self._on_time, is_running)
        self.links = {
            peer: Link(peer, connection.sock, connection.stream(), admit, self.poller.stuck, self.poller.pause)
            for peer, connection in formed.connections.items()
        }
        self.peer_links: dict[int, PeerLink] = {rank: LoopbackLink(rank, admit, on_event), **self.links}
        if not self.links:
            self.all_lost.set()
        keep_from_children(self)

    def start(self) -> None:
        """Begin to read."""
        self.poller.start(list(self.links.values()))

    def post(self, peer: int, item: Outgoing | bytes) -> None:
        """Send a message or a control frame to `peer`; see `PeerLink.post`."""
        self.peer_links[peer].post(item)

    def is_open(self, peer: int) -> bool:
        """Whether `peer` can be reached, as far as is known."""
        return self.closed is None and self.peer_links[peer].is_open

    def _on_link_lost(self, link: Link, reason: str) -> None:
        self.lost[link.peer] = reason
        self._on_lost(link.peer)
        if len(self.lost) == len(self.links):
            self.all_lost.set()

    def _on_time(self, now: float) -> float:
        if now >= self._look_at:
            self._look_at = now + self._patience / tcp.LOOKS
            self._drop_silent()
        return min(self._look_at, self._expire(now))

    def _drop_silent(self) -> None:
        """A machine that loses its power closes no connection: only its silence tells."""
        for link in self.links.values():
            seconds = link.silence() if link.is_open else 0.0
            if seconds >= self._patience:
                link.mark_broken(f"its machine has not answered for {seconds:.1f} s")
                self.poller.stuck(link)

    def leave(self) -> None:
        """Tell the others that this agent closes, and close all connections."""
        links = [link for link in self.links.values() if link.is_open]
        for link in links:
            link.post(pack_goodbye())
        until = time.monotonic() + _FAREWELL
        _wait_for(lambda: all(link.is_flushed or not link.is_open for link in links), until)
        # A socket that is closed while it holds unread bytes discards what it has sent last. So the others close theirs
        # first, as they do when they receive the goodbye.
        for link in links:
            link.finish()
        _wait_for(lambda: not any(link.is_open for link in links), until)
        self.poller.stop()

    def abandon(self) -> None:
        """In a forked child: the connections and the threads are the parent's."""
        self.closed = FORKED
        self.is_over = True
        self.closing = threading.RLock()
        self.all_lost = locks.Event()
        self.all_lost.set()
        self.poller.abandon()


def _wait_for(is_so: Callable[[], bool], until: float) -> None:
    while not is_so() and time.monotonic() < until:
        time.sleep(0.001)
