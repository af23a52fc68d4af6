"""`Network`: the connections of one agent, how they begin and end, and the one thread for reading, for what the kernel
would not take at once, and for deadlines.

A caller that waits for its response **leads**: it reads the link itself until the response is there, and the thread
ignores that link meanwhile. This saves a hand-over between threads, which costs more than the rest of a small call.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ringfort.rpc.calls import RpcFuture
from ringfort.rpc.link import Link, LoopbackLink, PeerLink
from ringfort.rpc.outbound import Outgoing
from ringfort.rpc.protocol import Event, Head, pack_goodbye
from ringfort.rpc.setup import Formed
from ringfort.transport import locks, tcp
from ringfort.transport.forks import FORKED, keep_from_children
from ringfort.transport.progress import LONGEST, Spin

_log = logging.getLogger(__name__)

CLOSED = "this agent is closed"
_FAREWELL = 1.0
"""Seconds that closing gives the last frames to leave."""
_HAS_EPOLL = hasattr(select, "epoll")
"""Only epoll lets one thread change what is watched while another waits. Without it no caller leads."""
_ENDING = 10.0
"""Seconds that `stop` waits for the thread. It waits for nothing itself; a callback of a future may take its time."""
_PAUSE = 1e-6
"""Seconds to sleep; a system makes it 50 microseconds at least, which is what another thread needs."""


@dataclass(eq=False)
class Network:
    """A link to each rank, and the thread that reads them all. The thread sleeps until a link can be read or written, a
    deadline passes, or another thread wakes it.

    The callbacks run in the agent's thread or in that of a caller that leads, `on_lost` and `expire` in the agent's
    alone. No callback runs before `start`.
    """

    rank: int
    formed: Formed
    admit: Callable[[PeerLink, Head], bool]
    on_event: Callable[[PeerLink, Event], None]
    on_lost: Callable[[int], None]
    expire: Callable[[float], float]
    """Ends what is due at a time, and returns when to call it next."""
    is_running: Callable[[], bool]
    """Says whether functions are running at the moment."""
    closed: str | None = None
    """Why nothing can be sent any more, once the agent closes."""
    lost: dict[int, str] = field(default_factory=dict[int, str])
    """The ranks that have closed their agent or are lost, and why."""
    all_lost: locks.Event = field(default_factory=locks.Event)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.closing = threading.RLock()
        self.links = {
            peer: Link(peer, connection.sock, connection.stream(), self.admit, self.stuck, self.pause)
            for peer, connection in self.formed.connections.items()
        }
        loopback = LoopbackLink(self.rank, self.admit, self.on_event)
        self.peer_links: dict[int, PeerLink] = {self.rank: loopback, **self.links}
        self._patience, self._next_look = self.formed.patience, 0.0
        self._poll: Any = getattr(select, "epoll" if _HAS_EPOLL else "poll")()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._watched: dict[int, Link] = {}
        self._interests = threading.Lock()
        self._leaders: set[RpcFuture] = set()
        self._spin = Spin()
        self._stuck: deque[Link] = deque()
        self._is_awake = True  # a wake-up is on its way, or not needed
        self._sleeps_until = 0.0
        self._is_ending = False
        self._thread = locks.Thread(self._run, name=f"ringfort-rpc-{self.rank}")
        self._poll.register(self._wake_out.fileno(), select.POLLIN)
        keep_from_children(self)

    def start(self) -> None:
        """Begin to read."""
        if not self.links:
            self.all_lost.set()
        for link in self.links.values():
            self._watched[link.fd] = link
            self._poll.register(link.fd, select.POLLIN)
        self._thread.start()

    def post(self, peer: int, item: Outgoing | bytes) -> None:
        """Send a message or a control frame to `peer`; see `PeerLink.post`."""
        self.peer_links[peer].post(item)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the agent's own."""
        return self._thread is threading.current_thread()

    # --- for other threads ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """End the present sleep, or the next. May be called from anywhere, also while Python collects garbage."""
        if not self._is_awake:
            self._is_awake = True
            with suppress(OSError):  # full: it is awake; closed: nobody sleeps
                self._wake_in.send(b"\0")

    def wake_by(self, when: float) -> None:
        """Make sure that `expire` is called at `when`."""
        if when < self._sleeps_until:
            self.wake()

    def stuck(self, link: Link) -> None:
        """Have the thread write to `link` when it can; or drop it, if it has broken."""
        self._stuck.append(link)
        self.wake()

    def pause(self) -> None:
        """Between two parts of something large: let other threads have the interpreter, if any want it. Without this
        they would wait 5 ms (`sys.getswitchinterval`) again and again: a thread that gives the lock up for a system
        call has it back before another has woken."""
        if self.is_running() or any(leader.is_sent for leader in tuple(self._leaders)):
            time.sleep(_PAUSE)

    def lead(self, link: Link, future: RpcFuture) -> None:
        """Read `link` in this thread until `future` is done, or has to be waited for in another way."""
        if not _HAS_EPOLL:
            return
        is_nested = locks.is_mine(link.reading)  # in a callback of a future whose result this thread has just read
        try:
            if not link.reading.acquire(blocking=False):
                return
            self._leaders.add(future)
            link.is_led = True
            self._watch(link)
            self._read_until(link, future)
            link.is_led = is_nested
            link.reading.release()
            self._look_after(link, future)
        except BaseException:  # Ctrl-C, anywhere
            if not is_nested:  # otherwise the outer call does it
                link.is_led = False
                while locks.is_mine(link.reading):
                    link.reading.release()
            self._look_after(link, future)
            raise

    def _read_until(self, link: Link, future: RpcFuture) -> None:
        while not future.done() and link.is_open:
            if not self._spins(link) and not link.is_readable(future.deadline - time.monotonic()):
                return
            self._read(link)
        while link.has_pending and link.is_open:  # poll would not report it
            self._read(link)

    def _look_after(self, link: Link, future: RpcFuture) -> None:
        """Let the thread serve `link` again."""
        self._leaders.discard(future)
        self._watch(link)
        if link.broken is not None:
            self.stuck(link)

    def _spins(self, link: Link) -> bool:
        """Try for a moment before sleeping, as the engine does (transport/spin.py), unless other threads want to
        work."""
        if link.is_stuck or self.is_running():
            return False
        until = time.monotonic() + LONGEST
        for _ in range(self._spin.budget):
            os.sched_yield()
            if link.is_readable():
                self._spin.tell(paid=True)
                return True
            if time.monotonic() > until:
                break
        self._spin.tell(paid=False)
        return False

    # --- ending ---------------------------------------------------------------------------------------------------

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
        self.stop()

    def stop(self) -> None:
        """End the thread and close all links."""
        self._is_ending = True
        self.wake()
        if self._thread.is_alive() and not self.is_here:
            self._thread.join(_ENDING)
        for link in tuple(self._watched.values()):
            self._drop(link)
        with self._interests:
            self._close_descriptors()

    def abandon(self) -> None:
        """In a forked child: the connections and the threads are the parent's, and what the kernel watches for it
        stays."""
        self.closed = FORKED
        self.is_over = True
        self.closing = threading.RLock()
        self.all_lost = locks.Event()
        self.all_lost.set()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        if _HAS_EPOLL:
            self._poll.close()
        self._wake_in.close()
        self._wake_out.close()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_ending:
            try:
                self._turn()
            except Exception:  # a bug of ours: the calls of others must go on
                _log.exception("Bug in the RPC agent")

    def _turn(self) -> None:
        # First, so that whoever leaves something from here on wakes this thread: what was left earlier is seen below.
        self._is_awake, self._sleeps_until = False, float("inf")
        self._sleeps_until = self._end_what_is_due(time.monotonic())
        timeout = 0.0
        if not self._stuck and not self._is_ending and not self._pending():
            timeout = max(0.0, min(self._sleeps_until - time.monotonic(), tcp.LONGEST_SLEEP))
        found = self._poll.poll(timeout if _HAS_EPOLL else timeout * 1000)
        self._is_awake = True
        ready = self._pending()
        for fd, mask in found:
            link = self._watched.get(fd)
            if link is None:  # a wake-up, or a link that was just dropped
                with suppress(BlockingIOError):
                    while self._wake_out.recv(4096):
                        pass
                continue
            if mask & select.POLLOUT:
                link.write()
                self._watch(link)
            if mask & ~select.POLLOUT and link not in ready:
                ready.append(link)
        for link in ready:
            if link.fd in self._watched and link.reading.acquire(blocking=False):
                try:
                    self._read(link)
                finally:
                    link.reading.release()
                self._drop_if_broken(link)
        while self._stuck:
            self._look_at(self._stuck.popleft())

    def _end_what_is_due(self, now: float) -> float:
        """Return when to call this again."""
        if now >= self._next_look:
            self._next_look = now + self._patience / tcp.LOOKS
            for link in self.links.values():
                # A machine that loses its power closes no connection: only its silence tells.
                if link.is_open and (seconds := tcp.silence(link.sock)) >= self._patience:
                    link.mark_broken(f"its machine has not answered for {seconds:.1f} s")
                    self.stuck(link)
        return min(self._next_look, self.expire(now))

    def _pending(self) -> list[Link]:
        """Links with something to read that poll does not report."""
        return [link for link in self._watched.values() if link.has_pending and not link.is_led]

    def _watch(self, link: Link) -> None:
        """Tell the kernel what to watch `link` for."""
        mask = (0 if link.is_led else select.POLLIN) | (select.POLLOUT if link.is_stuck else 0)
        with self._interests, suppress(OSError, ValueError):  # it is being closed
            if link.fd in self._watched:
                self._poll.modify(link.fd, mask)

    def _read(self, link: Link) -> None:
        try:
            link.read(lambda event: self.on_event(link, event))
        except Exception as exc:  # a bug of ours: a message may be half read, so the link cannot be used any more
            _log.exception("Bug in the RPC agent; closing the link with rank %d", link.peer)
            link.broken = f"bug in this rank's agent: {exc!r}"
        except BaseException:  # Ctrl-C, in a caller that leads
            link.broken = "this rank was interrupted while reading"
            raise

    def _look_at(self, link: Link) -> None:
        if link.fd not in self._watched:
            return
        if link.broken is not None:
            link.hang_up()  # wakes the thread that reads
            with link.reading:
                self._read(link)  # what arrived before the end still counts
            self._drop_if_broken(link)
        else:
            self._watch(link)

    def _drop_if_broken(self, link: Link) -> None:
        if link.broken is not None:
            self._drop(link)
            self.lost[link.peer] = link.broken
            self.on_lost(link.peer)
            if len(self.lost) == len(self.links):
                self.all_lost.set()

    def _drop(self, link: Link) -> None:
        with self._interests:
            if self._watched.pop(link.fd, None) is None:
                return
            with suppress(OSError):
                self._poll.unregister(link.fd)
        link.close()


def _wait_for(is_so: Callable[[], bool], until: float) -> None:
    while not is_so() and time.monotonic() < until:
        time.sleep(0.001)
