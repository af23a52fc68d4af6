"""Large collectives over several connections at once: an array is cut into as many parts as there are connections, and
each is moved by a thread of its own over its own connections. To its caller that is one operation, with one error if
any.

How many are used is what the configuration says; with `auto` a group finds out in its first large collectives that are
alike, which go over one connection and over all of them in turn: from then on as was quicker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ringfort.backends.base import Backend
from ringfort.collectives import algorithms
from ringfort.collectives.algorithms import Span
from ringfort.collectives.operation import Memory, run_steps
from ringfort.config import MIB
from ringfort.transport.locks import Thread
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array

LEAST: Final = MIB
"""Bytes that a connection should have to move: to start and end a thread takes as long as to move 100 KB or so."""
TRIAL: Final = 24 * MIB
"""Bytes of a collective in which `auto` tries: long enough for a connection to gather speed, and no more than a bucket
of DistributedDataParallel, which has 25 MiB and may be the largest that a program ever sends."""
TRIALS: Final = 4
"""Calls alike of which every other one goes over all connections, before `auto` decides. Memory and connections are new
in the first of each way. Pieces of one array, tried in its first call, were judged wrongly by one group in six."""
_KINDS: Final = 64
"""Of calls that are compared at the same time."""
_WATCH: Final = 2.0
"""Seconds to wait for a thread at once; after an abort, for it to end at all."""
WORTH: Final = 1.2
"""How many times as quick all connections must be to be chosen: less is noise, and more threads."""

Move = Callable[[Backend, Span], None]
"""Moves the elements of a span over one connection."""


class Trials:
    """What a group has found out about its connections."""

    def __init__(self) -> None:
        self.used: int | None = None
        """How many are used; None before that is decided."""
        self.seconds: dict[bytes, list[float]] = {}
        """Of each of the calls so far, by what tells calls apart."""


class Columns(Memory):
    """Of an array of equal parts, of each the same bytes: what a connection has to move where a plan is in parts."""

    __slots__ = ("_within",)

    def __init__(self, parts: Array, *, unit: int, itemsize: int, span: Span) -> None:
        """The parts have `unit` bytes each; `span` is in elements of `itemsize`."""
        super().__init__(parts, unit=unit)
        self._within = slice(span[0] * itemsize, span[1] * itemsize)

    def __getitem__(self, span: Span) -> memoryview:
        return super().__getitem__(span)[self._within]


def used(backend: Backend) -> int | None:
    """How many connections the group's large collectives go over; None if it has not found out yet."""
    there, asked = len(backend.connections), backend.config.collective.connections
    return there if there == 1 or asked != "auto" else backend.group.part(Trials).used


def count_for(backend: Backend, nbytes: int) -> int:
    """How many connections an array of so many bytes goes over, once that is known."""
    there = len(backend.connections)
    return (used(backend) or 1) if nbytes >= there * LEAST else 1


def may_split(backend: Backend, nbytes: int) -> bool:
    """Whether an array of so many bytes may go over more than one connection."""
    return nbytes >= 2 * LEAST and 1 < len(backend.connections) <= nbytes // LEAST


def over_connections(backend: Backend, flat: Array, envelope: Envelope, move: Move) -> None:
    """Moves all of `flat`, which has the same size on every rank, by calls of `move`: of one connection each at a time,
    and of all in the order of the spans. Raises what ended the first that failed."""
    whole = 0, flat.size
    if not may_split(backend, flat.nbytes):
        move(backend, whole)
        return
    connections = backend.connections
    if used(backend) is None and flat.nbytes >= TRIAL:
        _try(backend, connections, whole, envelope, move)
    else:
        run_parts(backend, connections[: count_for(backend, flat.nbytes)], whole, envelope, move)


def run_parts(backend: Backend, connections: Sequence[Backend], span: Span, envelope: Envelope, move: Move) -> None:
    """Cuts `span` into a part for each of `connections`, and moves all at the same time."""
    start, stop = span
    parts = [(start + low, start + high) for low, high in algorithms.split(stop - start, len(connections))]
    failures: list[BaseException] = []  # the first is the cause, the others follow from it

    def run(number: int) -> None:
        try:
            move(connections[number], parts[number])
        except BaseException as exc:  # raised below, in the caller's thread
            failures.append(exc)
            backend.end_connections(number, envelope, exc)

    threads = [Thread(run, (number,), name=f"ringfort-connection-{number}") for number in range(1, len(connections))]
    try:
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            while thread.is_alive():  # its messages end by the collective's deadline
                thread.join(_WATCH)
    except BaseException as exc:  # Ctrl-C in the middle of this, or no thread to be had
        backend.abort(str(exc) or type(exc).__name__)
        for thread in threads:
            if thread.ident is not None:
                thread.join(_WATCH)
        raise
    if failures:
        try:
            # Ctrl-C belongs to this thread, whatever else has failed.
            raise next((failure for failure in failures if not isinstance(failure, Exception)), failures[0])
        finally:
            failures.clear()  # whose tracebacks know this frame


def _try(backend: Backend, connections: Sequence[Backend], span: Span, envelope: Envelope, move: Move) -> None:
    """Moves `span` over one connection or over all, in turn with the calls before that were like this one. The last of
    them decides, at every rank alike."""
    rank, n = backend.rank, backend.world_size
    trials = backend.group.part(Trials)
    tried = trials.seconds
    if envelope.call not in tried and len(tried) >= _KINDS:
        tried.clear()
    seconds = tried.setdefault(envelope.call, [])
    begun = time.perf_counter()
    run_parts(backend, connections if len(seconds) % 2 else connections[:1], span, envelope, move)
    seconds.append(time.perf_counter() - begun)
    if len(seconds) == TRIALS:
        table = np.zeros((n, 2))
        table[rank] = min(seconds[::2]), min(seconds[1::2])
        run_steps(backend, algorithms.ring_all_gather(rank, n), Memory(table.reshape(-1), unit=16), envelope)
        trials.used = choose(table, len(connections))
        tried.clear()


def choose(table: Array, connections: int) -> int:
    """How many to use, from the seconds that each rank took over one and over all. Pure, so the same everywhere."""
    one, all_of_them = (float(seconds) for seconds in table.max(axis=0))  # who ends last holds up all
    return connections if all_of_them * WORTH < one else 1
