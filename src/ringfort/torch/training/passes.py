"""`Passes`: the micro-batches of a run, one pass per `for`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class Counted(Protocol):
    """What is needed of a run."""

    @property
    def epoch(self) -> int: ...

    @property
    def is_finished(self) -> bool: ...

    def begin_again(self) -> bool: ...


class Passes:
    """The micro-batches of a run, one pass per `for`.

    A member without a part in the last step of a pass gets the first micro-batch of the next pass instead. That one is
    kept for the next `for`. A `for` that was left in the middle of a pass is continued by the next one, which also
    begins with the micro-batch that the program had not computed.
    """

    def __init__(self, run: Counted, batches: Iterator[Any], *, is_one: bool = False) -> None:
        """With `is_one` the whole run is as one pass."""
        self._run = run
        self._batches = batches
        self._is_one = is_one
        self._next: list[Any] = []
        """At most one."""
        self._given: list[Any] = []
        """The one that the program has; at most one."""
        self.is_over = False
        """Whether the run has finished, or this program has left it."""

    @property
    def number(self) -> int:
        """The pass of the next micro-batch, from 0."""
        return 0 if self._is_one else self._run.epoch

    def look(self) -> bool:
        """Wait for the next micro-batch, which stays. Return False if there is none."""
        if not self._next and not self.is_over:
            self._given.clear()
            try:
                self._next.append(next(self._batches))
            except StopIteration:
                self.is_over = True
        return bool(self._next)

    def take(self) -> Any:
        """Return the next micro-batch, after `look`."""
        self._given[:] = [self._next.pop()]
        return self._given[0]

    def __iter__(self) -> Iterator[Any]:
        if self._given and self._run.begin_again():
            self._next.append(self._given.pop())
        if not self.look():
            return
        begun = self.number
        while self.number == begun and self.look() and self.number == begun:
            yield self.take()
        self.finish()

    def finish(self) -> None:
        """After the last step of the run, wait until those who still need something from this member have it."""
        if self._run.is_finished:
            self.look()
