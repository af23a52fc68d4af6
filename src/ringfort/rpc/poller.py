"""`Poller`: the agent's one thread for reading, for what the kernel would not take at once, and for deadlines.

A caller that waits for its answer anyway **leads**: it reads the link itself until the answer is there, and the thread
looks away meanwhile. That saves a hand-over between threads, which costs more than everything else in a small call.
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

from ringfort.rpc.calls import RpcFuture
from ringfort.rpc.inbound import Event
from ringfort.rpc.link import Link
from ringfort.transport.locks import Thread, is_mine
from ringfort.transport.spin import LONGEST, Spin

_log = logging.getLogger(__name__)

_NEVER = 3600.0
"""Seconds: the longest sleep."""
_ENDING = 10.0
"""Seconds that `stop` waits for the thread. It waits for nothing itself; a callback of a future may take its time."""
_PAUSE = 1e-6
"""Seconds that are asked for; a system takes some 50 microseconds at the least, which is what another thread needs."""


class Poller:
    """Sleeps until a link can move, something is due, or somebody has left it something to do."""

    def __init__(
        self,
        name: str,
        handle: Callable[[Link, Event], None],
        lost: Callable[[Link, str], None],
        expire: Callable[[float], float],
        is_running: Callable[[], bool],
    ) -> None:
        """`expire` ends what is due at the time it is told and says when it wants to be called next. `is_running` says
        whether functions are run at the moment."""
        self._handle, self._lost, self._expire = handle, lost, expire
        # Only epoll lets another thread say what is looked for while one waits. Elsewhere nobody leads.
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._poll = select.poll() if self._epoll is None else None
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
        (self._epoll or self._poll).register(self._wake_out.fileno(), select.POLLIN)  # pyright: ignore[reportOptionalMemberAccess]

    def start(self, links: list[Link]) -> None:
        """Begins to serve `links`."""
        for link in links:
            self._links[link.fd] = link
            (self._epoll or self._poll).register(link.fd, select.POLLIN)  # pyright: ignore[reportOptionalMemberAccess]
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether this is the agent's own thread."""
        return self._thread is threading.current_thread()

    # --- for other threads ----------------------------------------------------------------------------------------

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

    def pause(self) -> None:
        """Between two pieces of something large: lets others have the interpreter, if there are any. Without it they
        would wait 5 ms (`sys.getswitchinterval`) again and again: a thread that gives the lock up for a system call has
        it back before another has woken."""
        if self._is_running() or any(leader.is_sent for leader in tuple(self._leaders)):
            time.sleep(_PAUSE)

    def lead(self, link: Link, future: RpcFuture) -> None:
        """Reads `link` in this thread until `future` is done, or is to be waited for in another way."""
        if self._epoll is None:
            return
        is_nested = is_mine(link.reading)  # in a callback of a future that this thread has just read the result of
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
            if not is_nested:  # else the call below does it
                link.is_led = False
                while is_mine(link.reading):
                    link.reading.release()
            self._look_after(link, future)
            raise

    def _read_until(self, link: Link, future: RpcFuture) -> None:
        while not future.done() and link.is_open:
            if not self._spins(link) and not link.wait_readable(future.deadline - time.monotonic()):
                return
            self._read(link)
        while link.has_pending and link.is_open:  # nobody would be told of it
            self._read(link)

    def _look_after(self, link: Link, future: RpcFuture) -> None:
        """The thread serves `link` again."""
        self._leaders.discard(future)
        self._watch(link)
        if link.broken is not None:
            self.stuck(link)

    def _spins(self, link: Link) -> bool:
        """Tries for a moment before the sleep, as the engine does (transport/spin.py), unless others want to work."""
        if link.is_stuck or self._is_running():
            return False
        until = time.monotonic() + LONGEST
        for _ in range(self._spin.budget):
            os.sched_yield()
            if link.is_readable:
                self._spin.tell(paid=True)
                return True
            if time.monotonic() > until:
                break
        self._spin.tell(paid=False)
        return False

    def abandon(self) -> None:
        """In a forked child: closes its copies of the descriptors; what the kernel watches for the parent stays."""
        if self._epoll is not None:
            self._epoll.close()
        self._wake_in.close()
        self._wake_out.close()

    def stop(self) -> None:
        """Ends the thread and closes all links."""
        self._is_over = True
        self.soon(lambda: None)
        if self._thread.is_alive() and not self.is_here:
            self._thread.join(_ENDING)
        for link in tuple(self._links.values()):
            self._drop(link)
        with self._interests:
            if self._epoll is not None:
                self._epoll.close()
            self._wake_in.close()
            self._wake_out.close()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._turn()
            except Exception:  # a fault of ours: the calls of others must go on
                _log.exception("a fault in the RPC agent")

    def _turn(self) -> None:
        # First, so that whoever leaves something from here on wakes us: what was left before is seen below.
        self._is_awake, self._sleeps_until = False, float("inf")
        self._sleeps_until = self._expire(time.monotonic())
        timeout = 0.0
        if not self._actions and not self._pending():
            timeout = max(0.0, min(self._sleeps_until - time.monotonic(), _NEVER))
        found = self._epoll.poll(timeout) if self._epoll is not None else self._poll_for(timeout)
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
                self._end_if_broken(link)
        while self._actions:
            self._actions.popleft()()

    def _poll_for(self, timeout: float) -> list[tuple[int, int]]:
        assert self._poll is not None
        return self._poll.poll(timeout * 1000)

    def _pending(self) -> list[Link]:
        """Links with something to read that the system knows nothing of."""
        return [link for link in self._links.values() if link.has_pending and not link.is_led]

    def _drain(self, fd: int) -> None:
        if fd == self._wake_out.fileno():
            with suppress(BlockingIOError):
                while self._wake_out.recv(4096):
                    pass

    def _watch(self, link: Link) -> None:
        """Says what is to be looked for on `link`."""
        mask = (0 if link.is_led else select.POLLIN) | (select.POLLOUT if link.is_stuck else 0)
        with self._interests, suppress(OSError, ValueError):  # it is being closed
            if link.fd in self._links:
                (self._epoll or self._poll).modify(link.fd, mask)  # pyright: ignore[reportOptionalMemberAccess]

    def _read(self, link: Link) -> None:
        try:
            link.read(lambda event: self._handle(link, event))
        except Exception as exc:  # a fault of ours: a message may be half read, so the link cannot be trusted any more
            _log.exception("a fault in the RPC agent: the link with rank %d ends", link.peer)
            link.broken = f"a fault here: {exc!r}"
        except BaseException:  # Ctrl-C, in a caller that leads
            link.broken = "this rank was interrupted while it read"
            raise

    def _look_at(self, link: Link) -> None:
        if link.fd not in self._links:
            return
        if link.broken is not None:
            link.hang_up()  # who reads must not sleep on
            with link.reading:
                self._read(link)  # what it said before its end still counts
            self._end_if_broken(link)
        else:
            self._watch(link)

    def _end_if_broken(self, link: Link) -> None:
        if link.broken is not None:
            self._drop(link)
            self._lost(link, link.broken)

    def _drop(self, link: Link) -> None:
        with self._interests:
            if self._links.pop(link.fd, None) is None:
                return
            with suppress(OSError):
                (self._epoll or self._poll).unregister(link.fd)  # pyright: ignore[reportOptionalMemberAccess]
        link.close()
