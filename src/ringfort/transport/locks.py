"""Locks and waits that an interrupt cannot leave half done.

Ctrl-C raises `KeyboardInterrupt` in the main thread between two bytecodes, also between `lock.acquire()` and the `try`
that would release the lock. Measured with a signal at a random moment of a tight loop, on Python 3.10 to 3.13:

- `lock.acquire()` and then `try`: left locked by 50 to 80% of the signals. `threading.Condition`, and so `Event` and
  `concurrent.futures.Future`, whose `__enter__` and `__exit__` are written in Python: 40 to 50%.
- `with lock:` over a lock that is written in C, as `Lock`, `RLock` and what inherits from them: never. No signal is
  handled between the C function that takes the lock and the block that releases it.

CPython handles signals when a Python function begins, when a call has returned and when a loop jumps back. So plain
assignments to variables and attributes that begin an exception handler, or follow a call directly, are made together or
not at all (none of 3000 signals came between on Python 3.11; test_interrupts.py looks with every version).

So Ringfort takes locks by `with`. Where a thread must not wait for a lock it tries an `RLock` inside a `try` whose
handler asks `is_mine`: the owner is recorded by the same C function that takes the lock. Threads wake each other
through what is here, and never through `Event`, `Condition` or `Future` of the standard library.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_RLock: Any = type(threading.RLock())


def is_mine(lock: Any) -> bool:
    """Whether this thread holds `lock`, which is an `RLock`."""
    return lock._is_owned()


class Signal:
    """Wakes one thread. Any thread may send it, also from a finaliser or a signal handler, because sending takes no
    lock. A signal that nobody waits for is kept."""

    __slots__ = ("_sent",)

    def __init__(self) -> None:
        self._sent: SimpleQueue[None] = SimpleQueue()

    def send(self) -> None:
        """End the present wait, or the next."""
        self._sent.put(None)

    def wait(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds. Return whether the signal came. Signals that came together count as
        one."""
        try:
            self._sent.get(timeout=timeout)
        except Empty:
            return False
        while not self._sent.empty():  # only this thread takes them
            self._sent.get()
        return True


class Condition(_RLock, threading.Condition):
    """A `threading.Condition` that is its own lock, so that `with` takes and releases it in C."""

    def __init__(self) -> None:
        # Not that of `threading.Condition`, which would put another lock's methods in place of these.
        self._waiters: deque[Any] = deque()
        self._lock: Condition = self

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `notify_all`, or until `timeout` seconds are over; the lock is held on return, in any case."""
        try:
            return threading.Condition.wait(self, timeout)
        finally:
            if not is_mine(self):  # interrupted just after it was let go of
                self.acquire()

    __repr__ = object.__repr__


class Event(threading.Event):
    """A `threading.Event` for threads that may be interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = Condition()


class Thread(threading.Thread):
    """A daemon thread. An interrupt of the thread that starts it cannot keep it from beginning."""

    def __init__(self, target: Callable[..., object], args: tuple[Any, ...] = (), *, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._started = Event()  # the starting thread waits for it
        # A set of all threads, for tests of Python's own, whose callback would swallow a Ctrl-C when this is freed.
        threading._dangling.discard(self)  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue]


class Future(futures.Future[T]):
    """A `concurrent.futures.Future` that an interrupt of a waiting thread cannot leave locked."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()

    def is_done_within(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds. Unlike `result`, raise nothing."""
        with self._condition:
            if not self.done():
                self._condition.wait(timeout)
            return self.done()
