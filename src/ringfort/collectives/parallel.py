"""Large collectives over several connections at once: an array is cut into as many parts as there are connections, and
each is moved by a thread of its own over its own connections. To its caller that is one operation, with one error if
any.

Only where the configuration gives their number: by itself, a group opens channels (channels.py), for large all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ringfort.backends.group import Group
from ringfort.collectives import algorithms
from ringfort.collectives.algorithms import Span
from ringfort.config import MIB
from ringfort.transport.locks import Thread
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array

LEAST: Final = MIB
"""Bytes that a connection should have to move: to start and end a thread takes as long as to move 100 KB or so."""
_WATCH: Final = 2.0
"""Seconds to wait for a thread at once; after an abort, for it to end at all."""

Move = Callable[[Group, Span], None]
"""Moves the elements of a span over one connection."""


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
    run_parts(group, group.connections, whole, envelope, move)


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
