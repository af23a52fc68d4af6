"""Accepting one connection for each expected place of a group, and refusing everything else."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.terms import Terms
from ringfort.errors import RendezvousTimeoutError
from ringfort.transport import tcp
from ringfort.transport.hello import Refused

_CHECK_EVERY = 0.1
"""Seconds between two calls of `check`."""

K = TypeVar("K", int, tuple[int, int])


def accept_each(
    listener: Listener,
    expected: Collection[K],
    connections: dict[K, Connection],
    place_of: Callable[[Connection], K | Refused],
    terms: Terms,
    what: str,
    *,
    advice: str = "start the missing ranks with the same address and world size",
    check: Callable[[int], None] | None = None,
) -> Iterator[tuple[K, Connection]]:
    """Accept a connection for each place in `expected`, put it into `connections`, and yield it.

    A place is a rank, or a rank and a number. `place_of` returns the place that a connection is for, or why it is
    refused. A connection that ends before all are there is dropped, and its place is expected again. `check` is called
    for each missing rank now and then, and raises if that rank cannot come any more.

    Raises `RendezvousTimeoutError` with the missing ranks, who was refused, and `advice`.
    """
    while missing := _missing(expected, connections):
        if terms.is_over:
            _drop_ended(expected, connections)
            missing = _missing(expected, connections)
            lines = [
                f"missing: rank {', '.join(map(str, missing))}",
                *(f"refused: {who}" for who in listener.refusals),
                f"to try: {advice}",
            ]
            raise RendezvousTimeoutError(what, terms.timeout, missing=missing, state="\n".join(lines))
        deadline = terms.deadline
        if check is not None:
            for rank in missing:
                check(rank)
            deadline = min(deadline, time.monotonic() + _CHECK_EVERY)
        for connection in listener.wait(deadline):
            _drop_ended(expected, connections)
            place = place_of(connection)
            if not isinstance(place, Refused) and place in connections:
                why = f"rank {_rank_of(place)} is taken by {connections[place].address}"
                place = Refused("rank_taken", f"{why}; give every process its own rank")
            if isinstance(place, Refused):
                listener.refuse(connection, place)
            else:
                connections[place] = connection
                yield place, connection


def _rank_of(place: int | tuple[int, int]) -> int:
    return place if isinstance(place, int) else place[0]


def _missing(expected: Collection[K], connections: dict[K, Connection]) -> list[int]:
    return sorted({_rank_of(place) for place in expected if place not in connections})


def _drop_ended(expected: Collection[K], connections: dict[K, Connection]) -> None:
    for place in [place for place in expected if place in connections and tcp.is_ended(connections[place].sock)]:
        connections.pop(place).close()
