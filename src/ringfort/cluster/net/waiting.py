"""`within`: a wait in the control service's loop that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. Raises `TimeoutError` after `seconds`. However this ends, `work` has ended before.

    Not `asyncio.wait_for`: up to Python 3.11 it forgets that it was cancelled when `work` ends in the same turn of the
    loop. So a connection that was refused just when its epoch ended went on, and who had cancelled it waited for it.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # where this was cancelled nobody else asks for it, and asyncio would complain
    if task.cancelled():
        raise TimeoutError(f"not done within {seconds:g} s")
    return task.result()
