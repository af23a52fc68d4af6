"""`Aside`: work that a call has done in another thread while it waits for the network itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType

from ringfort.transport.locks import Thread

_Task = Callable[[], object]
_ENDING = 5.0
"""Seconds that the end of the thread is waited for after an error. A task takes milliseconds."""


class Aside:
    """Runs tasks one after the other, in the order in which they were added: in a thread, or at once."""

    def __init__(self, *, is_threaded: bool) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        self._added = self._ended = 0
        self._is_threaded = is_threaded
        self._thread: Thread | None = None

    def add(self, task: _Task) -> int:
        """Run `task` when all before have ended. Return its number, for `wait`."""
        self._added += 1
        if self._is_threaded and self._thread is None:  # in the block of `with`, so that an interrupt ends it too
            thread = Thread(self._run, name="ringfort-codec")
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # no thread to be had: the peers must not wait for this rank
                self._is_threaded = False
        if self._thread is None:
            task()
        else:
            self._tasks.put(task)
        return self._added

    def wait(self, number: int) -> None:
        """Block until the task with this number has ended. Raise what the first that failed raised: none runs after
        it."""
        while self._thread is not None and self._ended < number:
            error = self._outcomes.get()
            self._ended += 1
            if error is not None:
                raise error

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:  # raised where it is waited for
                self._outcomes.put(error)
                return
            self._outcomes.put(None)

    def __enter__(self) -> Aside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for all tasks; after an error only for the one that runs, so that nothing touches their arrays any
        more."""
        try:
            if kind is None:
                self.wait(self._added)
        finally:
            with suppress(Empty):
                while True:
                    self._tasks.get_nowait()
            self._tasks.put(None)
            if self._thread is not None:
                self._thread.join(_ENDING)
