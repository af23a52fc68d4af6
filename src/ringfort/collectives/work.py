"""`Work`: the handle of something under way; and `Runner`: runs a group's operations in the order they were issued."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final
from weakref import WeakSet

from ringfort.config import check_timeout
from ringfort.errors import OperationTimeoutError
from ringfort.transport.locks import Future, Thread

_IDLE = 1.0
"""Seconds that the thread of a group stays when there is nothing to do: so that none outlives its use."""
_LAST = 2.0
"""Seconds that the end of the program waits for all threads that are still at something."""
_WATCH = 1.0
"""Seconds that a waiting caller sleeps at most before it looks whether the operation has begun: an interrupt may have
kept the group's thread from it."""
_ENDING = 10.0
"""Seconds that `Runner.close` waits for the thread. What is queued fails at once, so only a callback takes as long."""


class Work:
    """An operation under way. Its timeout is the operation's own; `wait` may give up earlier and be called again."""

    def __init__(self, what: str, *, help_out: Callable[[Work], None] | None = None) -> None:
        self._what = what
        self._future: Future[Any] = Future()
        self._help_out = help_out

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the operation has ended; returns its result or raises what it raised.

        Raises `OperationTimeoutError` if `timeout` seconds pass first; the operation goes on.
        """
        if timeout is not None:
            check_timeout(timeout)
        while True:
            if timeout is None and self._help_out is not None and not self._future.done():
                self._help_out(self)
            if self._future.is_done_within(_WATCH if timeout is None else timeout):
                return self._future.result()
            if timeout is not None:
                raise OperationTimeoutError(f"waiting for {self._what}", timeout, state="it goes on")

    def result(self) -> Any:
        """`wait()`, by the name that futures have."""
        return self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """What it raised; None if it has not ended or ended well."""
        return self._future.exception() if self._future.done() else None

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Calls `callback(work)` once it has ended, in the thread that ended it; now if it has already."""
        self._future.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # 40 ms that programs without it need not spend

        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        state = "under way" if not self._future.done() else "failed" if self._future.exception() else "done"
        return f"<Work {self._what}: {state}>"

    def run(self, action: Callable[[], Any]) -> None:
        """Does the work, in the thread that calls this."""
        try:
            self._future.set_result(action())
        except BaseException as exc:  # belongs to whoever waits
            if not self._future.done():
                self._future.set_exception(exc)
            if not isinstance(exc, Exception) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C: also belongs to this thread, which may wait for something else


class Runner:
    """Runs actions one at a time, in order. With nothing queued, a caller that waits anyway runs its own: handing over
    to another thread costs tens of microseconds. For the same reason, who waits for something that has not begun runs
    what is queued before it, and then that.

    The law of this class: **who runs something holds `turn`**, and nothing leaves the queue before its turn has come.
    So a caller that finds the queue empty and the turn free overtakes nothing that it has issued itself.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.turn = threading.Lock()
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self.queue: deque[tuple[Work, Callable[[], Any]]] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        _runners.add(self)

    def run(self, what: str, action: Callable[[], Any]) -> Any:
        """Runs `action` after all that was issued before; returns its result."""
        if self.queue or self.turn.locked():
            return self.submit(what, action).wait()
        with self.turn:
            return action()

    def submit(self, what: str, action: Callable[[], Any]) -> Work:
        """Queues `action` and returns at once."""
        work = Work(what, help_out=self._help_out)
        with self._lock:
            self.queue.append((work, action))
            if self._thread is None:
                thread = Thread(self._serve, name=self._name)
                thread.start()
                self._thread = thread
            else:
                self._arrived.notify_all()
        return work

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._arrived.wait_for(lambda: self.queue or self._is_closed, _IDLE)
                if not self.queue:
                    self._thread = None
                    return
            with self.turn:
                self._run_next()

    def _run_next(self) -> None:
        """The first in the queue, if a waiting caller has not run it. `turn` is held."""
        if self.queue:
            first = work, action = self.queue[0]
            try:
                self.queue.popleft()
                work.run(action)
            except BaseException:
                if not work.is_completed() and first not in self.queue:  # an interrupt came before it began
                    self.queue.appendleft(first)
                raise

    def _help_out(self, work: Work) -> None:
        """In the thread of a caller that waits for `work`: runs it, and what is before it, unless somebody is at it."""
        while not work.is_completed() and not self.turn.locked():
            with self.turn:
                self._run_next()

    def close(self, *, wait: bool) -> None:
        """Lets the thread end once the queue is empty. With `wait`, until it has: when the backend is closed, so that
        all that is queued fails at once."""
        thread = self._let_go()
        if thread is not None and (wait or not (self.queue or self.turn.locked())):
            thread.join(_ENDING)

    def end(self, deadline: float) -> None:
        """Lets the thread end likewise, and waits for that until `deadline`: at the end of the program."""
        thread = self._let_go()
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _let_go(self) -> threading.Thread | None:
        """The thread, unless it is the caller's, which now ends when the queue is empty."""
        with self._lock:
            self._is_closed = True
            self._arrived.notify_all()
            return None if self._thread is threading.current_thread() else self._thread


_runners: Final[WeakSet[Runner]] = WeakSet()
os.register_at_fork(after_in_child=_runners.clear)  # a child has none of the threads, and perhaps a lock of theirs


@atexit.register
def _end_threads() -> None:
    """A thread that is inside C++, such as what a program has hung on a future of torch's, would be ended there with
    the interpreter, and then C++ ends the whole process as a crash."""
    deadline = time.monotonic() + _LAST
    for runner in tuple(_runners):
        runner.end(deadline)
