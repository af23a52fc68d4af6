"""`Inspector`: a thread that looks at reduced buckets, so that the thread of the group goes on with the next one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from ringfort.transport.locks import Condition, Thread

_log = logging.getLogger(__name__)

_IDLE: Final = 0.25
"""Seconds that the thread stays when there is nothing to do: longer than between two buckets of a step. A new one is
nothing beside a step that takes longer, and none outlives its use."""


class Inspector:
    """Does one thing after the other in a thread. What fails there is logged: whoever finishes a reduction does what is
    left of it, and finds the same."""

    def __init__(self) -> None:
        self._todo: deque[Callable[[], object]] = deque()
        self._changed = Condition()
        self._is_running = False

    def do(self, todo: Callable[[], object]) -> None:
        """Have it done soon. Any thread may call this."""
        with self._changed:
            self._todo.append(todo)
            self._changed.notify()
            if self._is_running:
                return
            self._is_running = True
        Thread(self._work, name="ringfort-inspector").start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._todo and not self._changed.wait_for(lambda: self._todo, _IDLE):
                    self._is_running = False
                    return
                todo = self._todo.popleft()
            try:
                todo()
            except Exception:
                _log.debug("A result could not be looked at ahead of time", exc_info=True)
            del todo  # it holds the memory of a result, which is wanted for the next one
