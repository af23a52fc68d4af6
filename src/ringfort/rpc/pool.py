"""`Pool`: a fixed number of threads that run calls, and a bounded queue in front of them.

A worker whose function waits for a call of its own runs requests meanwhile that are nested deeper than the one it works
on. So ranks that call each other back never run out of workers: the deepest request always finds one.
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

_WATCH = 1.0
"""Seconds that a worker that waits for a call sleeps at most before it looks whether that call has ended."""
_PATIENCE = 2.0
"""Seconds that closing waits for functions that still run. Their threads are daemons: they do not keep the program."""
_IDLE = -1


class Task(Protocol):
    """Something to run. `depth` is the number of calls that wait for it."""

    depth: int

    @property
    def is_cancelled(self) -> bool: ...


class _Worker:
    """A thread that runs tasks deeper than `depth`: all tasks, unless it waits for a call of its own."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Task | None] = SimpleQueue()
        """What it is handed: a task, or None to make it look again. None may come late and mean nothing."""
        self.depth = _IDLE

    def next(self, timeout: float | None) -> Task | None:
        """What it is handed within `timeout` seconds."""
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
        self._waiting: list[_Worker] = []
        self._threads: dict[_Worker, threading.Thread] = {}
        self._here = threading.local()
        self._is_over = False

    @property
    def queued(self) -> int:
        """How many tasks wait for a worker."""
        return len(self._queue)

    @property
    def is_running(self) -> bool:
        """Whether a worker does anything but wait."""
        return len(self._threads) > len(self._waiting)

    def submit(self, task: Task) -> bool:
        """Have a worker run `task`, now or later. Return False if the queue is full."""
        with self._lock:
            if self._is_over:
                return False
            worker = self._waiting[-1] if self._waiting else None  # the one that was busy last: its memory is warm
            if worker is not None and worker.depth > _IDLE:  # one that waits for a call: idle ones come first
                worker = min(self._waiting, key=lambda worker: worker.depth)
            if (worker is None or worker.depth > _IDLE) and len(self._threads) < self._most:
                self._start(task)
            elif worker is not None and worker.depth < task.depth:
                worker.inbox.put(task)
                self._waiting.remove(worker)  # last: an interrupt must not lose a worker
            elif self._has_room():
                self._queue.append(task)
            else:
                return False
        return True

    def _has_room(self) -> bool:
        if len(self._queue) >= self._max_queued:
            # Tasks that were given up are in the queue until somebody looks.
            self._queue = deque(task for task in self._queue if not task.is_cancelled)
        return len(self._queue) < self._max_queued

    def _start(self, task: Task) -> None:
        worker = _Worker()
        thread = Thread(self._work, (worker, task), name=f"{self._name}-{len(self._threads)}")
        thread.start()
        self._threads[worker] = thread

    def _work(self, worker: _Worker, task: Task | None) -> None:
        self._here.worker = worker
        while task is not None or not self._is_over:
            if task is not None:
                self._run(task)
            task = self._take(worker) or worker.inbox.get()

    def _take(self, worker: _Worker) -> Task | None:
        """Take the first queued task that `worker` may run. If there is none, let it be handed the next one."""
        with self._lock:
            if worker in self._waiting:
                self._waiting.remove(worker)
            for index, task in enumerate(self._queue):
                if task.depth > worker.depth:
                    del self._queue[index]
                    return task
            self._waiting.append(worker)
        return None

    def _leave(self, worker: _Worker) -> None:
        """Stop waiting, and give away what `worker` was handed last."""
        with self._lock:
            if worker in self._waiting:
                self._waiting.remove(worker)
        with suppress(Empty):
            while True:
                task = worker.inbox.get_nowait()
                if task is not None and not self.submit(task):
                    self._run(task)  # the queue is full: it was accepted and must end

    def _run(self, task: Task) -> None:
        try:
            self._run_it(task)
        except Exception:  # a bug of ours, because errors of functions are results: the worker goes on
            _log.exception("Bug in the RPC agent")

    def run_one(self, timeout: float | None) -> bool:
        """Run the next task in this thread. Without workers, wait for it up to `timeout` seconds. Return whether there
        was one."""
        until = None if timeout is None else time.monotonic() + timeout
        worker = _Worker()
        try:
            while True:
                task = self._take(worker)
                if task is None and not self._most and not self._is_over:
                    task = worker.next(None if until is None else max(0.0, until - time.monotonic()))
                if task is None:
                    return False
                if not task.is_cancelled:
                    self._run(task)
                    return True
        finally:
            self._leave(worker)

    def help_until(self, future: Future[Any], depth: int) -> bool:
        """In a worker of this pool: run requests deeper than `depth` until `future` is done. Return False elsewhere."""
        worker: _Worker | None = getattr(self._here, "worker", None)
        if worker is None:
            return False
        before, worker.depth = worker.depth, depth
        future.add_done_callback(lambda _: worker.inbox.put(None))
        try:
            while not future.done():
                task = self._take(worker) or worker.next(_WATCH)
                if task is not None:
                    self._run(task)
        finally:
            worker.depth = before
            self._leave(worker)
        return True

    def close(self) -> None:
        """End the workers: idle ones now, the others when their functions end. Wait a moment for them."""
        with self._lock:
            self._is_over = True
            self._queue.clear()
            workers = {*self._threads, *self._waiting}
        for worker in workers:
            worker.inbox.put(None)
        until = time.monotonic() + _PATIENCE
        for thread in self._threads.values():
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
