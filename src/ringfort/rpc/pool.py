"""`Pool`: a fixed number of threads that run calls, and a queue with a bound in front of them.

A worker whose function waits for a call of its own does not only wait: it runs requests that are nested deeper than
what it waits in. So ranks that call each other back never run out of workers, however many they are: the deepest
request always finds one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ringfort.transport.locks import Thread

_log = logging.getLogger(__name__)


class Task(Protocol):
    """Something to run. `depth` is the number of calls that wait for it."""

    depth: int

    @property
    def is_cancelled(self) -> bool: ...


class _Worker:
    """A thread and what is handed to it: a task, or None to look up from what it waits for. None may come late: whoever
    gets it looks for himself."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Task | None] = SimpleQueue()
        self.depth = 0  # of what it waits in, while it helps

    def next(self, timeout: float) -> Task | None:
        """What is handed to it within `timeout` seconds."""
        try:
            return self.inbox.get(timeout=timeout)
        except Empty:
            return None


class Pool:
    """Runs tasks."""

    def __init__(self, name: str, workers: int, max_queued: int, run: Callable[[Any], None]) -> None:
        self._name = name
        self._most = workers
        self._max_queued = max_queued
        self._run_it = run
        self._lock = threading.Lock()
        self._queue: deque[Task] = deque()
        self._idle: list[_Worker] = []
        self._helping: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        self._here = threading.local()
        self._asked = SimpleQueue[None]()  # one for each task that waits for `run_one`
        self._is_over = False

    @property
    def queued(self) -> int:
        """Tasks that wait for a worker."""
        return len(self._queue)

    @property
    def is_running(self) -> bool:
        """Whether a worker does something else than wait."""
        return len(self._threads) > len(self._idle) + len(self._helping)

    def submit(self, task: Task) -> bool:
        """Has a worker run `task`, now or later. False if the queue is full."""
        with self._lock:
            if self._is_over:
                return False
            if self._idle:
                self._idle[-1].inbox.put(task)  # the one that was busy last: its memory is warm
                self._idle.pop()  # last: an interrupt must not lose a worker
                return True
            if len(self._threads) < self._most:
                self._start(task)
                return True
            helper = next((worker for worker in self._helping if worker.depth < task.depth), None)
            if helper is not None:
                self._helping.remove(helper)
                helper.inbox.put(task)
                return True
            if len(self._queue) >= self._max_queued:
                # Those that were given up still stand in the queue until somebody looks.
                self._queue = deque(waiting for waiting in self._queue if not waiting.is_cancelled)
                if len(self._queue) >= self._max_queued:
                    return False
            self._queue.append(task)
        if not self._most:
            self._asked.put(None)
        return True

    def run_one(self, timeout: float | None) -> bool:
        """Runs the next task in this thread; waits for it up to `timeout` seconds. Whether there was one."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._most == 0:
                try:
                    self._asked.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
                except Empty:
                    return False
            with self._lock:
                task = self._queue.popleft() if self._queue else None
            if task is not None and not task.is_cancelled:
                self._run(task)
                return True
            if self._is_over or self._most:
                return False

    def _run(self, task: Task) -> None:
        try:
            self._run_it(task)
        except Exception:  # a fault of ours, for those of functions are results: the worker goes on
            _log.exception("a fault in the RPC agent")

    def _start(self, task: Task) -> None:
        worker = _Worker()
        thread = Thread(self._work, (worker, task), name=f"{self._name}-{len(self._threads)}")
        thread.start()
        self._threads.append(thread)

    def _work(self, worker: _Worker, task: Task | None) -> None:
        self._here.worker = worker
        while True:
            if task is not None:
                self._run(task)
                task = None
            with self._lock:
                if self._queue:
                    task = self._queue.popleft()
                elif self._is_over:
                    return
                else:
                    self._idle.append(worker)
            while task is None:
                task = worker.inbox.get()
                if task is None and self._is_over:
                    return

    def help_until(self, future: Future[Any], depth: int) -> bool:
        """In a worker of this pool: runs requests deeper than `depth` until `future` is done. False elsewhere."""
        worker: _Worker | None = getattr(self._here, "worker", None)
        if worker is None:
            return False
        before, worker.depth = worker.depth, depth
        future.add_done_callback(lambda _: worker.inbox.put(None))
        try:
            while not future.done():
                task = self._take_deeper(worker) or worker.next(_WATCH)
                if task is not None:
                    self._run(task)
        finally:
            worker.depth = before
            self._leave(worker)
        return True

    def _take_deeper(self, worker: _Worker) -> Task | None:
        with self._lock:
            for index, task in enumerate(self._queue):
                if task.depth > worker.depth:
                    del self._queue[index]
                    return task
            if worker not in self._helping:
                self._helping.append(worker)
        return None

    def _leave(self, worker: _Worker) -> None:
        """No longer helps; gives away what it was handed last."""
        with self._lock:
            if worker in self._helping:
                self._helping.remove(worker)
        with suppress(Empty):
            while True:
                task = worker.inbox.get_nowait()
                if task is not None and not self.submit(task):
                    self._run(task)  # the queue is full: it was taken and must end

    def close(self) -> None:
        """Ends the workers that have nothing to do, and the others when they have ended what they run. Waits a moment
        for them."""
        with self._lock:
            self._is_over = True
            idle, self._idle = self._idle, []
            self._queue.clear()
        for worker in idle:
            worker.inbox.put(None)
        self._asked.put(None)
        until = time.monotonic() + _PATIENCE
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))


_WATCH = 1.0
"""Seconds that a worker that waits for a call sleeps at most before it looks whether that has ended."""
_PATIENCE = 2.0
"""Seconds that closing waits for functions that still run. They are daemons: they do not keep the program."""
