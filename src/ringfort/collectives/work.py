"""`Work`: the handle of something under way; and `Runner`: runs a group's operations in the order they were issued."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final

from ringfort.config import check_timeout
from ringfort.errors import OperationTimeoutError
from ringfort.telemetry.step_time import serve
from ringfort.telemetry.trace import own_trace
from ringfort.transport.forks import WeakGroup, keep_from_children
from ringfort.transport.locks import Future, Thread

_log = logging.getLogger(__name__)

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
        self._callbacks: deque[Callable[[Work], object]] = deque()

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the operation has ended; return its result or raise what it raised.

        Raises `OperationTimeoutError` if `timeout` seconds pass first; the operation continues.
        """
        if timeout is not None:
            check_timeout(timeout)
        if self._future.done():
            return self._future.result()
        with own_trace().blocked():
            return self._wait(timeout)

    def _wait(self, timeout: float | None) -> Any:
        while True:
            if timeout is None and self._help_out is not None and not self._future.done():
                self._help_out(self)
            if self._future.is_done_within(_WATCH if timeout is None else timeout):
                return self._future.result()
            if timeout is not None:
                raise OperationTimeoutError(f"waiting for {self._what}", timeout, state="the operation continues")

    def result(self) -> Any:
        """Return `wait()`: the name that futures have for it."""
        return self.wait()

    def is_completed(self) -> bool:
        """Return whether it has ended, well or badly."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Return what it raised; None if it has not ended or ended well."""
        return self._future.exception() if self._future.done() else None

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Call `callback(work)` once it has ended, in the thread that ended it; now if it has already. The callback
        may wait, also for other work of the same group. What it raises is logged."""
        self._callbacks.append(callback)
        if self._future.done():
            self.call_back()

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # 40 ms that programs without it need not spend

        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        state = "under way" if not self._future.done() else "failed" if self._future.exception() else "done"
        return f"<Work {self._what}: {state}>"

    def run(self, action: Callable[[], Any]) -> None:
        """Do the work and call the callbacks, in the thread that calls this."""
        self.settle(action)
        self.call_back()

    def settle(self, action: Callable[[], Any]) -> None:
        """Do the work. `call_back` is left to the caller, who may hold what a callback needs."""
        try:
            self._future.set_result(action())
        except BaseException as exc:  # belongs to whoever waits
            if not self._future.done():
                self._future.set_exception(exc)
            if not isinstance(exc, Exception) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C: also belongs to this thread, which may wait for something else

    @property
    def has_callbacks(self) -> bool:
        """Whether there are callbacks that have not been called."""
        return bool(self._callbacks)

    def call_back(self) -> None:
        """Call the callbacks, once the work has ended. Each is taken from the queue before it is called, so two
        threads that are here at once call it once."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            try:
                callback(self)
            except Exception:
                _log.exception("A callback of %r failed", self)


class Runner:
    """Runs actions one at a time, in order. With nothing queued, a caller that waits anyway runs its own: handing over
    to another thread costs tens of microseconds. For the same reason, who waits for something that has not begun runs
    what is queued before it, and then that.

    The law of this class: **who runs something holds `turn`**, and nothing leaves the queue before its turn has come.
    So a caller that finds the queue empty and the turn free overtakes nothing that it has issued itself.

    Callbacks are called without the turn, and by a thread that has stopped serving the queue: they may wait for what is
    queued, or queue something and wait for that. While they do, another thread serves.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.abandon()
        _runners.add(self)
        keep_from_children(self)

    def abandon(self) -> None:
        """Begin with nothing: also in a forked child, where the threads do not exist and may have held a lock."""
        self.turn = threading.Lock()
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._vacant = threading.Condition(self._lock)
        self.queue: deque[tuple[Work, Callable[[], Any]]] = deque()
        self._server: threading.Thread | None = None
        """The thread that serves the queue. It is never in a callback."""
        self._is_idle = False
        """Whether the server waits for something to do."""
        self._threads: set[threading.Thread] = set()
        self._spares = 0
        """Threads that have come back from a callback and wait until the server enters one."""
        self._is_closed = False

    def run(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` after all that was issued before; return its result."""
        if self.queue or self.turn.locked():
            return self.submit(what, action).wait()
        with self.turn, own_trace().blocked():
            return action()

    def submit(self, what: str, action: Callable[[], Any]) -> Work:
        """Queue `action` and return at once."""
        work = Work(what, help_out=self._help_out)
        with self._lock:
            self.queue.append((work, action))
            if self._server is not None:
                self._arrived.notify_all()
            else:
                self._find_server()
        return work

    def _find_server(self) -> None:
        """Wake a spare thread or start one. `_lock` is held, and nobody serves."""
        if self._spares:
            self._vacant.notify_all()
            return
        thread = Thread(self._serve, name=self._name)
        thread.start()  # which may raise; it waits for `_lock` first
        self._threads.add(thread)
        self._server = thread

    def _serve(self) -> None:
        me = threading.current_thread()
        serve()
        while self._get_seat(me):
            with self.turn:
                work = self._run_next()
            if work is None or not work.has_callbacks:
                continue
            with self._lock:
                self._server = None
                if self.queue:
                    self._find_server()
            work.call_back()

    def _get_seat(self, me: threading.Thread) -> bool:
        """Wait until this thread serves and there is something to run. False if it should end."""
        with self._lock:
            if self._server is None:
                self._server = me
            if self._server is not me:
                self._spares += 1
                self._vacant.wait_for(lambda: self._is_closed or self._is_deserted(), _IDLE)
                self._spares -= 1
                if self._is_deserted():
                    self._server = me
            if self._server is me:
                self._is_idle = True
                self._arrived.wait_for(lambda: self.queue or self._is_closed, _IDLE)
                self._is_idle = False
                if self.queue:
                    return True
                self._server = None
            self._threads.discard(me)
            return False

    def _is_deserted(self) -> bool:
        """Whether something is queued and nobody serves. `_lock` is held."""
        return self._server is None and bool(self.queue)

    def _run_next(self) -> Work | None:
        """Run the first in the queue, if a waiting caller has not; its callbacks are left to the caller. `turn` is
        held."""
        if not self.queue:
            return None
        first = work, action = self.queue[0]
        try:
            self.queue.popleft()
            work.settle(action)
        except BaseException:
            if not work.is_completed() and first not in self.queue:  # an interrupt came before it began
                self.queue.appendleft(first)
            raise
        return work

    def _help_out(self, work: Work) -> None:
        """In the thread of a caller that waits for `work`: runs it, and what is before it, unless somebody is at it.

        The main thread leaves what has callbacks to the others: Ctrl-C would keep them from being called, and who waits
        for a future that one of them completes, inside C++, would wait for ever."""
        is_main = threading.current_thread() is threading.main_thread()
        while not work.is_completed() and not self.turn.locked():
            with self.turn:
                if is_main and self.queue and self.queue[0][0].has_callbacks:
                    break
                ended = self._run_next()
            if ended is not None:
                ended.call_back()
        if not work.is_completed():
            with self._lock:
                if self._is_deserted():
                    self._find_server()

    def close(self, *, wait: bool) -> None:
        """Let the threads end once the queue is empty. With `wait`, until they have: when the backend is closed, so
        that all that is queued fails at once."""
        idle = self._server if self._is_idle else None
        for thread in self.let_go():
            if wait or thread is idle:
                thread.join(_ENDING)

    def end(self, deadline: float) -> None:
        """Let the threads end likewise, and wait for that until `deadline`: at the end of the program."""
        for thread in self.let_go():
            thread.join(max(0.0, deadline - time.monotonic()))

    def let_go(self) -> list[threading.Thread]:
        """Return the threads but the caller's own, which now end when the queue is empty."""
        with self._lock:
            self._is_closed = True
            self._arrived.notify_all()
            self._vacant.notify_all()
            return [thread for thread in self._threads if thread is not threading.current_thread()]


_runners: Final[WeakGroup[Runner]] = WeakGroup()
os.register_at_fork(after_in_child=_runners.clear)


@atexit.register
def _end_threads() -> None:
    """A thread that is inside C++, such as what a program has hung on a future of torch's, would be ended there with
    the interpreter, and then C++ ends the whole process as a crash."""
    deadline = time.monotonic() + _LAST
    for runner in _runners.alive():
        runner.end(deadline)
