"""Large collectives over several connections at once: an array is cut into as many parts as there are stripes, and each
is moved by a thread of its own over its own connections. To its caller that is one operation, with one error if any.

How many are used is what the configuration says; with `auto` a group finds out in its first large collective, in which
everybody is: it moves two pieces of the array over one stripe and two over all of them, and the rest as was quicker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from ringfort.backends.base import Backend
from ringfort.collectives import plan
from ringfort.collectives.operation import Memory, run_steps
from ringfort.collectives.plan import Span
from ringfort.config import MIB
from ringfort.transport.fold import Array
from ringfort.transport.messages import Envelope

LEAST: Final = MIB
"""Bytes that a stripe should have to move: to start and end a thread takes as long as to move 100 KB or so."""
TRIAL: Final = 32 * MIB
"""Bytes of a collective in which `auto` tries. A piece is an eighth of it: long enough for a connection to gather
speed, for less would judge its first milliseconds."""
WORTH: Final = 1.2
"""How many times as quick all stripes must be to be chosen: less is noise, and more threads."""

Move = Callable[[Backend, Span], None]
"""Moves the elements of a span over one stripe."""

_used: WeakKeyDictionary[Backend, int] = WeakKeyDictionary()


class Columns(Memory):
    """Of an array of equal parts, of each the same bytes: what a stripe has to move where a plan is in parts."""

    __slots__ = ("_within",)

    def __init__(self, parts: Array, *, unit: int, itemsize: int, span: Span) -> None:
        """The parts have `unit` bytes each; `span` is in elements of `itemsize`."""
        super().__init__(parts, unit=unit)
        self._within = slice(span[0] * itemsize, span[1] * itemsize)

    def __getitem__(self, span: Span) -> memoryview:
        return super().__getitem__(span)[self._within]


def used(backend: Backend) -> int | None:
    """How many stripes the group's large collectives go over; None if it has not found out yet."""
    there, asked = len(backend.stripes), backend.config.collective.stripes
    return there if there == 1 or asked != "auto" else _used.get(backend)


def count_for(backend: Backend, nbytes: int) -> int:
    """How many stripes an array of so many bytes goes over, once that is known."""
    there = len(backend.stripes)
    return (used(backend) or 1) if nbytes >= there * LEAST else 1


def may_stripe(backend: Backend, nbytes: int) -> bool:
    """Whether an array of so many bytes may go over more than one stripe."""
    return nbytes >= 2 * LEAST and 1 < len(backend.stripes) <= nbytes // LEAST


def over_stripes(backend: Backend, flat: Array, envelope: Envelope, move: Move) -> None:
    """Moves all of `flat`, which has the same size on every rank, by calls of `move`: of one stripe each at a time, and
    of all in the order of the spans. Raises what ended the first that failed."""
    whole = 0, flat.size
    if not may_stripe(backend, flat.nbytes):
        move(backend, whole)
        return
    stripes = backend.stripes
    if used(backend) is None and flat.nbytes >= TRIAL:
        whole = _try(backend, stripes, flat.size, envelope, move), flat.size
    run_parts(backend, stripes[: count_for(backend, flat.nbytes)], whole, envelope, move)


def run_parts(backend: Backend, stripes: Sequence[Backend], span: Span, envelope: Envelope, move: Move) -> None:
    """Cuts `span` into a part for each of `stripes`, and moves all at the same time."""
    start, stop = span
    parts = [(start + low, start + high) for low, high in plan.split(stop - start, len(stripes))]
    failures: list[BaseException] = []  # the first is the cause, the others follow from it

    def run(number: int) -> None:
        try:
            move(stripes[number], parts[number])
        except BaseException as exc:  # raised below, in the caller's thread
            failures.append(exc)
            backend.end_stripes(number, envelope, exc)

    threads = [
        threading.Thread(target=run, args=(number,), name=f"ringfort-stripe-{number}", daemon=True)
        for number in range(1, len(stripes))
    ]
    try:
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
    except BaseException as exc:  # Ctrl-C in the middle of this, or no thread to be had
        backend.abort(str(exc) or type(exc).__name__)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # whose tracebacks know this frame


def _try(backend: Backend, stripes: Sequence[Backend], count: int, envelope: Envelope, move: Move) -> int:
    """Finds out whether all stripes are quicker than one; returns how many elements that has moved."""
    rank, n = backend.rank, backend.world_size
    piece = count // 8
    ways = (stripes[:1], stripes)
    quickest = [float("inf")] * 2
    for turn in range(4):
        begun = time.perf_counter()
        run_parts(backend, ways[turn % 2], (turn * piece, (turn + 1) * piece), envelope, move)
        quickest[turn % 2] = min(quickest[turn % 2], time.perf_counter() - begun)
    table = np.zeros((n, 2))
    table[rank] = quickest
    run_steps(backend, plan.ring_all_gather(rank, n), Memory(table.reshape(-1), unit=16), envelope)
    _used[backend] = choose(table, len(stripes))
    return 4 * piece


def choose(table: Array, stripes: int) -> int:
    """How many to use, from the seconds that each rank took over one and over all. Pure, so the same everywhere."""
    one, all_of_them = (float(seconds) for seconds in table.max(axis=0))  # who ends last holds up all
    return stripes if all_of_them * WORTH < one else 1
