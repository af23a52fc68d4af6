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

from ringfort.backends.group import Group
from ringfort.collectives import algorithms
from ringfort.collectives.algorithms import Span
from ringfort.collectives.steps import gather_rows
from ringfort.config import MIB
from ringfort.telemetry.trace import own_trace
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

Move = Callable[[Group, Span], None]
"""Moves the elements of a span over one connection."""


class Trials:
    """What a group has found out about its connections."""

    def __init__(self) -> None:
        self.used: int | None = None
        """How many are used; None before that is decided."""
        self.seconds: dict[bytes, list[float]] = {}
        """Of each of the calls so far, by what tells calls apart."""


def used(group: Group) -> int | None:
    """How many connections the group's large collectives go over; None if it has not found out yet."""
    there, asked = len(group.connections), group.config.collective.connections
    return there if there == 1 or asked != "auto" else group.part(Trials).used


def count_for(group: Group, nbytes: int) -> int:
    """How many connections an array of so many bytes goes over, once that is known."""
    there = len(group.connections)
    return (used(group) or 1) if nbytes >= there * LEAST else 1


def may_split(group: Group, nbytes: int) -> bool:
    """Whether an array of so many bytes may go over more than one connection."""
    return nbytes >= 2 * LEAST and 1 < len(group.connections) <= nbytes // LEAST


def over_connections(group: Group, flat: Array, envelope: Envelope, move: Move) -> None:
    """Move all of `flat`, which has the same size on every rank, by calls of `move`: of one connection each at a time,
    and of all in the order of the spans. Raises what ended the first that failed."""
    whole = 0, flat.size
    if not may_split(group, flat.nbytes):
        move(group, whole)
        return
    connections = group.connections
    if used(group) is None and flat.nbytes >= TRIAL:
        _try(group, connections, whole, envelope, move)
    else:
        run_parts(group, connections[: count_for(group, flat.nbytes)], whole, envelope, move)


def run_parts(group: Group, connections: Sequence[Group], span: Span, envelope: Envelope, move: Move) -> None:
    """Cut `span` into a part for each of `connections`, and move all at the same time."""
    start, stop = span
    parts = [(start + low, start + high) for low, high in algorithms.split(stop - start, len(connections))]
    failures: list[BaseException] = []  # the first is the cause, the others follow from it

    def run(number: int) -> None:
        try:
            move(connections[number], parts[number])
        except BaseException as exc:  # raised below, in the caller's thread
            failures.append(exc)
            group.end_connections(number, envelope, exc)

    threads = [Thread(run, (number,), name=f"ringfort-connection-{number}") for number in range(1, len(connections))]
    try:
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            while thread.is_alive():  # its messages end by the collective's deadline
                thread.join(_WATCH)
    except BaseException as exc:  # Ctrl-C in the middle of this, or no thread to be had
        group.abort(str(exc) or type(exc).__name__)
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


def _try(group: Group, connections: Sequence[Group], span: Span, envelope: Envelope, move: Move) -> None:
    """Move `span` over one connection or over all, in turn with the calls before that were like this one. The last of
    them decides, at every rank alike."""
    trials = group.part(Trials)
    tried = trials.seconds
    if envelope.call not in tried and len(tried) >= _KINDS:
        tried.clear()
    seconds = tried.setdefault(envelope.call, [])
    begun = time.perf_counter()
    run_parts(group, connections if len(seconds) % 2 else connections[:1], span, envelope, move)
    seconds.append(time.perf_counter() - begun)
    if len(seconds) == TRIALS:
        best = min(seconds[::2]), min(seconds[1::2])
        trials.used = choose(gather_rows(group, best, envelope), len(connections))
        tried.clear()
        own_trace().event("connections", f"Large collectives use {trials.used} of {len(connections)} connections")


def choose(table: Array, connections: int) -> int:
    """How many to use, from the seconds that each rank took over one and over all. Pure, so the same everywhere."""
    one, all_of_them = (float(seconds) for seconds in table.max(axis=0))  # who ends last holds up all
    return connections if all_of_them * WORTH < one else 1
