"""`VirtualClock`: time that moves only when a test says so."""

from __future__ import annotations

import threading
import time
from itertools import count

from ringfort.errors import InvalidArgumentError, OperationTimeoutError

_LOOK_AGAIN = 0.0005
"""Real seconds between two looks at who sleeps: nothing tells a clock that a thread has just fallen asleep."""


class VirtualClock:
    """A `Clock` for `SimulatedBackend.create_group(n, clock=...)`: a minute's timeout passes in no time.

    A test starts its ranks in threads, waits until they sleep, and moves the time:

        clock.wait_for_sleepers(1)
        clock.advance(60)
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()
        self._serial = count()
        self._sleepers: dict[int, tuple[threading.Condition, float]] = {}  # bell and deadline of each wait

    def now(self) -> float:
        """Seconds; moved by `advance` alone."""
        return self._now

    def wait(self, bell: threading.Condition, deadline: float) -> None:
        """Sleeps on `bell`, which is held, until it rings or `advance` reaches `deadline`."""
        with self._lock:
            if self._now >= deadline:
                return
            serial = next(self._serial)
            self._sleepers[serial] = (bell, deadline)
        try:
            bell.wait()
        finally:
            with self._lock:
                del self._sleepers[serial]

    def advance(self, seconds: float) -> None:
        """Moves the time on and wakes those whose deadline has come. Raises `InvalidArgumentError` for going back."""
        if not seconds >= 0:
            raise InvalidArgumentError("seconds", seconds, "time never goes back")
        with self._lock:
            self._now += seconds
            due = [bell for bell, deadline in self._sleepers.values() if deadline <= self._now]
        for bell in due:
            with bell:
                bell.notify_all()

    def wait_for_sleepers(self, number: int, *, timeout: float = 30.0) -> None:
        """Blocks until at least `number` threads sleep on this clock at one moment, so that nothing more will happen
        before time moves. Raises `OperationTimeoutError` after `timeout` real seconds."""
        give_up = time.monotonic() + timeout
        # Who is in two looks slept all the time between them; so if there are enough, they slept at one moment.
        while len(self._asleep() & self._asleep()) < number:
            if time.monotonic() >= give_up:
                raise OperationTimeoutError(f"waiting for {number} sleepers", timeout, state=repr(self))
            time.sleep(_LOOK_AGAIN)

    def _asleep(self) -> set[int]:
        with self._lock:
            return {serial for serial, (bell, _) in self._sleepers.items() if _has_waiters(bell)}

    def __repr__(self) -> str:
        return f"<VirtualClock at {self._now:g} s, {len(self._asleep())} asleep>"


def _has_waiters(bell: threading.Condition) -> bool:
    """Whether somebody sleeps on `bell`. One that has rung has no waiters at once, though they are yet to run; nothing
    public tells the two apart."""
    return bool(bell._waiters)  # type: ignore[attr-defined]  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue, reportUnknownArgumentType]
