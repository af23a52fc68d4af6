"""Which connections wait at a listening socket before they have proved membership, and which of them makes room. Pure.

Both listeners, `transport.listener` and `cluster.listener`, hold the same limits.
"""

from __future__ import annotations

import errno
import ipaddress
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

MAX_WAITING: Final = 64
"""Connections that have not proved themselves. A new one takes the place of another (see `who_makes_room`); a member
that lost its place connects again."""
HANDSHAKE_TIMEOUT: Final = 5.0
"""Seconds a connection may take to prove itself, however slowly it drips. A peer needs milliseconds."""
ACCEPT_PAUSE: Final = 0.1
"""Seconds without accepting after the system refused to: new connections wait in the kernel's queue meanwhile."""

CROWDED: Final = "too many strangers at once"


class Waiting(Protocol):
    """A connection that has not proved itself yet."""

    @property
    def source(self) -> str:
        """Where it comes from, as `source_of` has it."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether it has sent a valid first message."""
        ...


W = TypeVar("W", bound=Waiting)


def who_makes_room(waiting: Sequence[W], pick: Callable[[Sequence[W]], W] = random.choice) -> W:
    """Return the connection to drop for a new one. `waiting` is in the order of arrival.

    It is one of the source that holds the most places, so a flood from one address costs only that address. Among
    those, one that has sent no valid first message, the oldest first: a member sends its own with the connection, and
    then needs a round trip. Where all have sent one, chance decides: the oldest would always be the one with the
    longest round trip.
    """
    places = Counter(one.source for one in waiting)
    most = max(places.values())
    crowd = [one for one in waiting if places[one.source] == most]
    silent = [one for one in crowd if not one.has_begun]
    return silent[0] if silent else pick(crowd)


def source_of(host: str) -> str:
    """Return what counts as one source: an IPv4 address, or the /64 network of an IPv6 address. A machine can take any
    number of addresses in its /64."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))


def why_not_accepted(exc: OSError) -> str:
    """Return why the system does not accept connections now; empty where there was only nobody left to accept.

    A listening socket stays readable as long as a connection waits. So after such an error the listener must pause, or
    it would try again at once, for ever.
    """
    if isinstance(exc, (BlockingIOError, InterruptedError, ConnectionAbortedError)):
        return ""
    mend = "; raise the limit with `ulimit -n`, or close what is not used" if exc.errno == errno.EMFILE else ""
    return f"{exc.strerror or exc}{mend}"
