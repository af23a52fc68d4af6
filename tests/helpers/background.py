"""A call in a thread of its own, to be looked at while it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ringfort.testing import VirtualClock

R = TypeVar("R")

PATIENCE = 20.0
"""Real seconds for what should have ended at once."""


class Background(Generic[R]):
    """Runs `call(*args, **kwargs)` in a thread; `result` gives what came of it."""

    def __init__(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> None:
        self._outcome: list[R] = []
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._outcome.append(call(*args, **kwargs))
            except BaseException as exc:
                self._error = exc

        self._thread = threading.Thread(target=run, name="background", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, clock: VirtualClock) -> Background[R]:
        """Lets time pass, step by step, until the call is over."""
        for _ in range(int(PATIENCE / 0.001)):
            self._thread.join(0.001)
            if self.is_over:
                break
            clock.advance(0.02)
        return self

    def result(self) -> R:
        """What the call returned; raises what it raised, or `AssertionError` if it hangs."""
        self._thread.join(PATIENCE)
        assert self.is_over, "the call hangs"
        if self._error is not None:
            raise self._error
        return self._outcome[0]
