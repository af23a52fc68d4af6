"""The listener's limits for unauthenticated clients: how many may wait, how long, and which one makes room. Pure."""

from __future__ import annotations

import errno
import ipaddress
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

MAX_WAITING: Final = 64
"""Clients that have not proved membership. A new one takes the place of another (see `who_makes_room`); a member that
lost its place connects again."""
HANDSHAKE_TIMEOUT: Final = 5.0
"""Seconds for a whole handshake, however slowly its bytes come. A member needs milliseconds."""
ACCEPT_PAUSE: Final = 0.1
"""Seconds without accepting after the system refused to: new connections wait in the kernel's queue meanwhile."""
TOO_MANY: Final = "too many unauthenticated connections at once"


def who_makes_room(waiting: Sequence[tuple[str, bool]], pick: Callable[[list[int]], int] = random.choice) -> int:
    """Return the place in `waiting` of the client to drop for a new one. `waiting` has for each client, in the order of
    arrival, where it comes from (`source_of`) and whether it has sent a valid first message.

    It belongs to the source that holds the most places, so a flood from one address costs only that address. Among
    its clients, the oldest that has sent no valid first message goes first: a member sends its own with the connection,
    and then needs a round trip. If all have sent one, chance decides: the oldest would always be the one with the
    longest round trip.
    """
    held = Counter(source for source, _ in waiting)
    most = max(held.values())
    crowd = [place for place, (source, _) in enumerate(waiting) if held[source] == most]
    silent = [place for place in crowd if not waiting[place][1]]
    return silent[0] if silent else pick(crowd)


def source_of(host: str) -> str:
    """Return what counts as one source: an IPv4 address, or the /64 network of an IPv6 address, because one machine can
    take any number of addresses in its /64."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))


def why_not_accepted(exc: OSError) -> str:
    """Return why the system cannot accept connections now; empty if there was only no connection left to accept.

    A listening socket stays readable as long as a connection waits. After such an error the listener must pause, or it
    would try again at once, without end.
    """
    if isinstance(exc, (BlockingIOError, InterruptedError, ConnectionAbortedError)):
        return ""
    mend = "; raise the limit with `ulimit -n`, or close unused files" if exc.errno == errno.EMFILE else ""
    return f"{exc.strerror or exc}{mend}"
