"""`VirtualClock`: time that only moves when a test advances it."""

from __future__ import annotations

import threading
import time
from itertools import count

from ringfort.errors import InvalidArgumentError, OperationTimeoutError

_LOOK_AGAIN = 0.0005
"""Real seconds between two looks at the sleepers: a thread does not report that it has fallen asleep."""


class VirtualClock:
    """A `Clock` for `SimulatedBackend.create_group(n, clock=...)`: long timeouts pass at once.

    A test starts its ranks in threads, waits until they sleep, and advances the time:

        clock.wait_for_sleepers(1)
        clock.advance(60)
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()
        self._serial = count()
        self._sleepers: dict[int, tuple[threading.Condition, float]] = {}  # condition and deadline of each wait

    def now(self) -> float:
        """Return the current time in seconds."""
        return self._now

    def wait(self, bell: threading.Condition, deadline: float) -> None:
        """Wait on the condition `bell`, which is held, until it is notified or `advance` reaches `deadline`."""
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
        """Advance the time and wake those whose deadline has passed. Raises `InvalidArgumentError` if negative."""
        if not seconds >= 0:
            raise InvalidArgumentError("seconds", seconds, "must not be negative")
        with self._lock:
            self._now += seconds
            due = [bell for bell, deadline in self._sleepers.values() if deadline <= self._now]
        for bell in due:
            with bell:
                bell.notify_all()

    def wait_for_sleepers(self, number: int, *, timeout: float = 30.0) -> None:
        """Wait until at least `number` threads sleep on this clock at the same time, so that nothing more happens
        before the time advances. Raises `OperationTimeoutError` after `timeout` real seconds."""
        give_up = time.monotonic() + timeout
        # A thread that sleeps in two successive looks slept all the time between them. So if enough threads are in
        # both, they slept at the same time.
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
    """Whether a thread waits on `bell`. After a notification there are no waiters, even before their threads run; no
    public interface tells that."""
    return bool(bell._waiters)  # type: ignore[attr-defined]  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue, reportUnknownArgumentType]
