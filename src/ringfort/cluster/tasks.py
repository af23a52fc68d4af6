"""`BackgroundTasks`: asyncio tasks that belong to one object and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from socket import socket
from typing import Any


class BackgroundTasks:
    """Keeps a reference to each task until it is done."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], sock: socket | None = None) -> None:
        """Run `work`. A socket that `work` takes over is closed if the task is cancelled, possibly before it began."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if sock is not None:
            task.add_done_callback(lambda done: sock.close() if done.cancelled() else None)

    def __len__(self) -> int:
        return len(self._tasks)

    async def cancel(self, timeout: float | None = None) -> None:
        """Cancel all tasks and wait until they have ended, at most `timeout` seconds."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
