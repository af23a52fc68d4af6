"""`Poller`: the agent's one thread, for reading, for what the kernel would not take at once, and for deadlines.

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
from typing import Any

from ringfort.rpc.calls import RpcFuture
from ringfort.rpc.inbound import Event
from ringfort.rpc.link import Link
from ringfort.transport.locks import Thread, is_mine
from ringfort.transport.spin import LONGEST, Spin
from ringfort.transport.tcp import LONGEST_SLEEP

_log = logging.getLogger(__name__)

_HAS_EPOLL = hasattr(select, "epoll")
"""Only epoll lets one thread change what is watched while another waits. Without it no caller leads."""
_ENDING = 10.0
"""Seconds that `stop` waits for the thread. It waits for nothing itself; a callback of a future may take its time."""
_PAUSE = 1e-6
"""Seconds to sleep; a system makes it 50 microseconds at least, which is what another thread needs."""


class Poller:
    """Sleeps until a link can be read or written, a deadline passes, or another thread has left an action."""

    def __init__(
        self,
        name: str,
        handle: Callable[[Link, Event], None],
        lost: Callable[[Link, str], None],
        expire: Callable[[float], float],
        is_running: Callable[[], bool],
    ) -> None:
        """`expire(now)` ends what is due and returns when to call it next. `is_running` says whether functions are
        running at the moment."""
        self._handle, self._lost, self._expire = handle, lost, expire
        self._poll: Any = getattr(select, "epoll" if _HAS_EPOLL else "poll")()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._links: dict[int, Link] = {}
        self._interests = threading.Lock()
        self._is_running = is_running
        self._leaders: set[RpcFuture] = set()
        self._spin = Spin()
        self._actions: deque[Callable[[], None]] = deque()
        self._is_awake = True  # a wake-up is on its way, or not needed
        self._sleeps_until = 0.0
        self._is_over = False
        self._thread = Thread(self._run, name=name)
        self._poll.register(self._wake_out.fileno(), select.POLLIN)

    def start(self, links: list[Link]) -> None:
        """Begin to serve `links`."""
        for link in links:
            self._links[link.fd] = link
            self._poll.register(link.fd, select.POLLIN)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the agent's own."""
        return self._thread is threading.current_thread()

    # --- for other threads ----------------------------------------------------------------------------------------

    def soon(self, action: Callable[[], None]) -> None:
        """Have the thread run `action`. May be called from anywhere, also while Python collects garbage."""
        self._actions.append(action)
        self.wake()

    def wake(self) -> None:
        """End the present sleep, or the next."""
        if not self._is_awake:
            self._is_awake = True
            with suppress(OSError):  # full: it is awake; closed: nobody sleeps
                self._wake_in.send(b"\0")

    def wake_by(self, when: float) -> None:
        """Make sure that `expire` is called at `when`."""
        if when < self._sleeps_until:
            self.wake()

    def stuck(self, link: Link) -> None:
        """Have `link` written to when it can be; or dropped, if it has broken."""
        self.soon(lambda: self._look_at(link))

    def pause(self) -> None:
        """Between two parts of something large: let other threads have the interpreter, if any want it. Without this
        they would wait 5 ms (`sys.getswitchinterval`) again and again: a thread that gives the lock up for a system
        call has it back before another has woken."""
        if self._is_running() or any(leader.is_sent for leader in tuple(self._leaders)):
            time.sleep(_PAUSE)

    def lead(self, link: Link, future: RpcFuture) -> None:
        """Read `link` in this thread until `future` is done, or has to be waited for in another way."""
        if not _HAS_EPOLL:
            return
        is_nested = is_mine(link.reading)  # in a callback of a future whose result this thread has just read
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
                while is_mine(link.reading):
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
        if link.is_stuck or self._is_running():
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

    def abandon(self) -> None:
        """Close this process's descriptors. Also for a forked child: what the kernel watches for the parent stays."""
        if _HAS_EPOLL:
            self._poll.close()
        self._wake_in.close()
        self._wake_out.close()

    def stop(self) -> None:
        """End the thread and close all links."""
        self._is_over = True
        self.soon(lambda: None)
        if self._thread.is_alive() and not self.is_here:
            self._thread.join(_ENDING)
        for link in tuple(self._links.values()):
            self._drop(link)
        with self._interests:
            self.abandon()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._turn()
            except Exception:  # a bug of ours: the calls of others must go on
                _log.exception("Bug in the RPC agent")

    def _turn(self) -> None:
        # First, so that whoever leaves an action from here on wakes this thread: earlier ones are seen below.
        self._is_awake, self._sleeps_until = False, float("inf")
        self._sleeps_until = self._expire(time.monotonic())
        timeout = 0.0
        if not self._actions and not self._pending():
            timeout = max(0.0, min(self._sleeps_until - time.monotonic(), LONGEST_SLEEP))
        found = self._poll.poll(timeout if _HAS_EPOLL else timeout * 1000)
        self._is_awake = True
        ready = self._pending()
        for fd, mask in found:
            link = self._links.get(fd)
            if link is None:
                self._drain(fd)
                continue
            if mask & select.POLLOUT:
                link.write()
                self._watch(link)
            if mask & ~select.POLLOUT and link not in ready:
                ready.append(link)
        for link in ready:
            if link.fd in self._links and link.reading.acquire(blocking=False):
                try:
                    self._read(link)
                finally:
                    link.reading.release()
                self._drop_if_broken(link)
        while self._actions:
            self._actions.popleft()()

    def _pending(self) -> list[Link]:
        """Links with something to read that poll does not report."""
        return [link for link in self._links.values() if link.has_pending and not link.is_led]

    def _drain(self, fd: int) -> None:
        if fd == self._wake_out.fileno():
            with suppress(BlockingIOError):
                while self._wake_out.recv(4096):
                    pass

    def _watch(self, link: Link) -> None:
        """Tell the kernel what to watch `link` for."""
        mask = (0 if link.is_led else select.POLLIN) | (select.POLLOUT if link.is_stuck else 0)
        with self._interests, suppress(OSError, ValueError):  # it is being closed
            if link.fd in self._links:
                self._poll.modify(link.fd, mask)

    def _read(self, link: Link) -> None:
        try:
            link.read(lambda event: self._handle(link, event))
        except Exception as exc:  # a bug of ours: a message may be half read, so the link cannot be used any more
            _log.exception("Bug in the RPC agent; closing the link with rank %d", link.peer)
            link.broken = f"bug in this rank's agent: {exc!r}"
        except BaseException:  # Ctrl-C, in a caller that leads
            link.broken = "this rank was interrupted while reading"
            raise

    def _look_at(self, link: Link) -> None:
        if link.fd not in self._links:
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
            self._lost(link, link.broken)

    def _drop(self, link: Link) -> None:
        with self._interests:
            if self._links.pop(link.fd, None) is None:
                return
            with suppress(OSError):
                self._poll.unregister(link.fd)
        link.close()
