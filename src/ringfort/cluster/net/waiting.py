"""Waiting in the control service's event loop: for sockets (`run`), and with a time limit (`within`)."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

from ringfort.bootstrap.connection import SocketSteps

T = TypeVar("T")


async def run(steps: SocketSteps[T], seconds: float | None = None) -> T:
    """Run `steps` and return their result, as `bootstrap.connection.run` does in a thread. They get a `TimeoutError`
    after `seconds`."""
    loop = asyncio.get_running_loop()
    deadline = None if seconds is None else loop.time() + seconds
    try:
        waiting = next(steps)
        while True:
            try:
                await _ready(*waiting, deadline)
            except OSError as exc:
                waiting = steps.throw(exc)
            else:
                waiting = next(steps)
    except StopIteration as done:
        return done.value
    finally:
        steps.close()


async def _ready(sock: socket.socket, event: int, deadline: float | None) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    is_read = event == select.POLLIN
    add, remove = (loop.add_reader, loop.remove_reader) if is_read else (loop.add_writer, loop.remove_writer)
    add(sock, lambda: ready.done() or ready.set_result(None))
    try:
        await asyncio.wait({ready}, timeout=None if deadline is None else deadline - loop.time())
    finally:
        remove(sock)
    if not ready.done():
        raise TimeoutError("timed out")


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Raises `TimeoutError` after `seconds`. In any case `work` has ended by then.

    Not `asyncio.wait_for`: up to Python 3.11 it forgets that it was cancelled if `work` ends in the same turn of the
    loop. So a connection that was refused just when its epoch ended continued, and its canceller waited for it.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # if this was cancelled nobody else asks for it, and asyncio would complain
    if task.cancelled():
        raise TimeoutError(f"not done within {seconds:g} s")
    return task.result()
