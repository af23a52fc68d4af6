"""`StepTime`: where the time of the current step goes; and `Blocked`, which measures the time that a thread waits.

Only time in which the program waits counts: a collective in the background that nobody waits for takes none of it. What
is left of a step is computing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import IntEnum
from time import perf_counter
from typing import Final, NamedTuple

_FIRST_LOOK: Final = 64
"""Sources after which those that are gone are looked for, in a program that makes many groups and no steps."""


class Phase(IntEnum):
    """Where the time of a step goes, apart from computing."""

    DATA = 0
    EXCHANGE = 1
    CODEC = 2
    SEAL = 3


class Exchanged(NamedTuple):
    """What a source has found since it was last asked."""

    seconds: float = 0.0
    """Time that the program was in collectives."""
    reduced: int = 0
    """Bytes of the arrays that were reduced."""


class Spent(NamedTuple):
    """The time of one step."""

    seconds: float
    data: float
    exchange: float
    codec: float
    seal: float
    reduced: int
    """Bytes of the arrays that were reduced."""


Source = Callable[[], Exchanged | None]
"""Returns what was exchanged since it was last called; None if its owner is gone, so that it is dropped."""


class StepTime:
    """The time of the current step. All methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._began = clock()
        self._spent = [0.0] * len(Phase)
        self._coded = self._compressed = 0.0
        """Seconds in codecs, and in the collectives that they belong to, in whichever thread those ran."""
        self._reduced = 0
        self._sources: list[Source] = []
        self._look_at = _FIRST_LOOK

    def add(self, phase: Phase, seconds: float) -> None:
        """Count `seconds` for `phase`."""
        self._spent[phase] += seconds

    def compressed(self, codec: float, seconds: float) -> None:
        """Count a collective with compression that took `seconds`, of which the codec took `codec`."""
        self._coded += codec
        self._compressed += seconds

    def add_source(self, source: Source) -> None:
        """Ask `source` at the end of each step."""
        with self._lock:
            self._sources.append(source)
            if len(self._sources) >= self._look_at:
                self._ask()
                self._look_at = max(_FIRST_LOOK, 2 * len(self._sources))

    def restart(self) -> None:
        """Begin the step anew: what was spent so far belongs to none."""
        with self._lock:
            self._ask()
            self._clear()

    def take(self) -> Spent:
        """Return the time of the step that ends now, and begin the next."""
        with self._lock:
            self._ask()
            seconds = max(0.0, self._clock() - self._began)
            spent, reduced = self._spent, max(0, self._reduced)
            codec = _share(spent[Phase.EXCHANGE], self._coded, self._compressed)
            self._clear()
        spent[Phase.EXCHANGE] -= codec
        spent[Phase.CODEC] += codec
        data, exchange, codec, seal = _within(seconds, spent)
        return Spent(seconds, data, exchange, codec, seal, reduced)

    def reassign(self, phase: Phase, seconds: float, *, exchanged: float, reduced: int) -> None:
        """Count `seconds` for `phase` alone, although a collective of `exchanged` seconds was in them, which has
        reduced so many bytes. (Unlike `paused`, this asks no source, which would take as long as a small collective.)
        """
        self._spent[phase] += seconds
        self._spent[Phase.EXCHANGE] -= exchanged
        self._reduced -= reduced

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave the time of the block out: it belongs to no step."""
        before, start = self._snapshot(), self._clock()
        try:
            yield
        finally:
            self._restore(before)
            self._began += self._clock() - start

    def _snapshot(self) -> tuple[list[float], int]:
        with self._lock:
            self._ask()
            return self._spent.copy(), self._reduced

    def _restore(self, before: tuple[list[float], int]) -> None:
        with self._lock:
            self._ask()
            self._spent, self._reduced = before

    def _clear(self) -> None:
        self._began, self._spent = self._clock(), [0.0] * len(Phase)
        self._coded = self._compressed = 0.0
        self._reduced = 0

    def _ask(self) -> None:
        kept: list[Source] = []
        for source in self._sources:
            found = source()
            if found is not None:
                self._spent[Phase.EXCHANGE] += found.seconds
                self._reduced += found.reduced
                kept.append(source)
        if len(kept) != len(self._sources):
            self._sources = kept


def _share(exchange: float, coded: float, compressed: float) -> float:
    """The part of `exchange` that codecs took. A program that waits for a collective from its begin waits for all of
    its codec; one that waits only for its end is taken to wait for the same share of both."""
    return min(coded, exchange * min(1.0, coded / compressed)) if compressed > 0 else 0.0


def _within(seconds: float, spent: list[float]) -> list[float]:
    """The phases of a step, which together take no longer than the step: threads may wait at the same time."""
    spent = [max(0.0, one) for one in spent]
    total = sum(spent)
    scale = 1.0 if total <= seconds or not total else seconds / total
    return [min(seconds, one * scale) for one in spent]


# --- time in which a thread waits -------------------------------------------------------------------------------------


class _Scope(threading.local):
    depth = 0
    """Blocks that this thread is in."""
    is_service = False


_scope: Final = _Scope()


def serve() -> None:
    """Say that this thread works for others in the background, so that what it waits for does not count."""
    _scope.is_service, _scope.depth = True, 1


def is_service_thread() -> bool:
    """Whether this thread has called `serve`."""
    return _scope.is_service


class Blocked:
    """Counts the time of a block for a phase. Blocks inside it, in the same thread, count nothing: a callback that runs
    while its thread waits may wait itself."""

    __slots__ = ("_phase", "_start", "_time")

    def __init__(self, time: StepTime, phase: Phase) -> None:
        self._time = time
        self._phase = phase

    def __enter__(self) -> None:
        _scope.depth += 1
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = perf_counter() - self._start
        _scope.depth -= 1
        if not _scope.depth:
            self._time.add(self._phase, seconds)
