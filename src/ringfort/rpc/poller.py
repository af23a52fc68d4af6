"""`Poller`: the agent's one thread for reading, for what the kernel would not take at once, and for deadlines."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ringfort.rpc.inbound import Event
from ringfort.rpc.link import Link

_log = logging.getLogger(__name__)

_NEVER = 3600.0
"""Seconds: the longest sleep."""


class Poller:
    """Sleeps until a link can move, something is due, or somebody has left it something to do."""

    def __init__(
        self,
        name: str,
        handle: Callable[[Link, Event], None],
        lost: Callable[[Link, str], None],
        expire: Callable[[float], float | None],
    ) -> None:
        """`expire` ends what is due at the time it is told and says when it wants to be called next."""
        self._handle, self._lost, self._expire = handle, lost, expire
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._links: set[Link] = set()
        self._actions: deque[Callable[[], None]] = deque()
        self._is_awake = True  # a wake-up is on its way, or not needed
        self._sleeps_until = 0.0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, links: list[Link]) -> None:
        """Begins to serve `links`."""
        for link in links:
            self._links.add(link)
            self._selector.register(link.sock, selectors.EVENT_READ, link)
        self._thread.start()

    def soon(self, action: Callable[[], None]) -> None:
        """Has the thread run `action`. May be called from anywhere, also while Python collects garbage."""
        self._actions.append(action)
        self.wake()

    def wake(self) -> None:
        """Ends the present sleep, or the next."""
        if not self._is_awake:
            self._is_awake = True
            with suppress(OSError):  # full: it is awake; closed: nobody sleeps
                self._wake_in.send(b"\0")

    def wake_by(self, when: float) -> None:
        """Makes sure that `expire` is called at `when`."""
        if when < self._sleeps_until:
            self.wake()

    def stuck(self, link: Link) -> None:
        """`link` wants to be written to when it can be, or has broken."""
        self.soon(lambda: self._look_at(link))

    def stop(self) -> None:
        """Ends the thread and closes all links. Not for the thread itself."""
        self._is_over = True
        self.soon(lambda: None)
        if self._thread.is_alive():
            self._thread.join()
        for link in self._links:
            link.close()
        self._links.clear()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._turn()
            except Exception:  # a fault of ours: the calls of others must go on
                _log.exception("a fault in the RPC agent")

    def _turn(self) -> None:
        # First, so that whoever leaves something from here on wakes us: what was left before is seen below.
        self._is_awake, self._sleeps_until = False, float("inf")
        due = self._expire(time.monotonic())
        self._sleeps_until = time.monotonic() + _NEVER if due is None else due
        if self._actions or any(link.has_pending for link in self._links):
            self._is_awake = True
            timeout = 0.0
        else:
            timeout = max(0.0, min(self._sleeps_until - time.monotonic(), _NEVER))
        found = self._selector.select(timeout)
        self._is_awake = True
        ready = {link for link in self._links if link.has_pending}
        for key, mask in found:
            link = key.data
            if link is None:
                with suppress(BlockingIOError):
                    while self._wake_out.recv(4096):
                        pass
                continue
            if mask & selectors.EVENT_WRITE and link in self._links:
                self._selector.modify(link.sock, selectors.EVENT_READ, link)
                link.write()
            if mask & selectors.EVENT_READ:
                ready.add(link)
        for link in ready:
            if link in self._links:
                self._read(link)
        while self._actions:
            self._actions.popleft()()

    def _read(self, link: Link) -> None:
        try:
            link.read(lambda event: self._handle(link, event))
        except Exception as exc:  # a fault of ours: a message may be half read, so the link cannot be trusted any more
            _log.exception("a fault in the RPC agent: the link with rank %d ends", link.peer)
            link.broken = f"a fault here: {exc!r}"
        if link.broken is not None:
            self._end(link)

    def _look_at(self, link: Link) -> None:
        if link not in self._links:
            return
        if link.broken is not None:
            self._read(link)  # what it said before its end still counts
        elif link.is_stuck:
            self._selector.modify(link.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def drop(self, link: Link) -> None:
        """`link` is not wanted any more. For the thread itself."""
        if link in self._links:
            self._links.discard(link)
            self._selector.unregister(link.sock)
            link.close()

    def _end(self, link: Link) -> None:
        reason = link.broken or "its connection ended"
        self.drop(link)
        self._lost(link, reason)
