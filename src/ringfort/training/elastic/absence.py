"""`Absence`: why a member is away from its run for a while. It says goodbye, and comes back as a learner."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ringfort.transport.locks import Condition

SLOW: Final = "it is too slow for now"
ASLEEP: Final = "its machine goes to sleep"
_FINISH: Final = 2.0
"""Seconds that a program has to finish its step before its machine sleeps. logind waits for 5 s by default
(InhibitDelayMaxSec), and saying goodbye takes up to 2 s."""
_AWAKE: Final = 60.0
"""Seconds after which a machine that was to sleep and did not is awake. The clock stands still while it sleeps."""

_LOOK: Final = 0.2
"""Seconds between two looks at whether the program wants to end."""


class Absence:
    """The one absence that is under way, if any. Thread-safe."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._why = ""
        self._has_left = False
        self._wakes_at = 0.0

    @property
    def why(self) -> str:
        """The reason; empty if this member takes part, or may again."""
        return self._why

    def begin(self, why: str) -> None:
        """Have the program's thread leave after its step."""
        with self._changed:
            if not self._why:
                self._why, self._has_left = why, False

    def fall_asleep(self, leave: Callable[[], None]) -> None:
        """The machine is about to sleep: return when this member has left the cluster. `leave` makes it leave at once,
        in the middle of its step, if the program does not call in time."""
        with self._changed:
            self._why, self._wakes_at = ASLEEP, time.monotonic() + _AWAKE
            deadline = time.monotonic() + _FINISH
            while not self._has_left and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._has_left:
                return
        leave()

    def wake_up(self) -> None:
        """The machine is awake, or does not sleep after all."""
        with self._changed:
            self._wakes_at = 0.0
            self._changed.notify_all()

    def left(self) -> None:
        """This member has said goodbye."""
        with self._changed:
            self._has_left = True
            self._changed.notify_all()

    def wait_for_end(self, is_closing: Callable[[], bool]) -> None:
        """Wait until the machine is awake or the program wants to end, and end the absence."""
        with self._changed:
            while (left := self._wakes_at - time.monotonic()) > 0 and not is_closing():
                self._changed.wait(min(left, _LOOK))
            self._why, self._has_left = "", False
