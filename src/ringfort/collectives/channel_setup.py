"""How the ranks of a group get channels: each listens for its neighbours in the ring, and they connect. Whatever goes
wrong, all agree that they go on over their links."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from struct import Struct
from typing import Final, NamedTuple

from ringfort.backends.group import Group
from ringfort.bootstrap.accepting import accept_each
from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.connector import connect
from ringfort.bootstrap.links import Routes
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.terms import Terms
from ringfort.collectives.steps import gather_rows
from ringfort.config import DEFAULT_PATIENCE, patience_of
from ringfort.errors import DistributedError, NoConnectionError, RendezvousTimeoutError
from ringfort.transport.channels import Channel, Channels, Wire
from ringfort.transport.finalisers import when_gone
from ringfort.transport.forks import keep_from_children
from ringfort.transport.hello import ExtraConnection, Refused
from ringfort.transport.machine import Machine
from ringfort.transport.messages import Envelope
from ringfort.transport.tcp import keep_alive, tune

_log = logging.getLogger(__name__)

_SECONDS: Final = 5.0
"""To connect. The ranks are connected already, so it takes milliseconds, unless a firewall is in the way."""
_ATTEMPT: Final = 1.0
"""Of these, after which a rank that connects looks whether the group is still whole."""
_OFFER: Final = Struct("<H16s32s")
_HINDRANCES: Final = (DistributedError, OSError, RuntimeError, MemoryError)
"""What keeps a rank from having channels: no way to a neighbour, or no more descriptors, threads (that is a
`RuntimeError`) or memory. The others must hear of it."""

Place = tuple[int, int]
"""A rank, and the number of a connection with it: even if the one who opens it sends on it, odd if it receives."""


class _Offer(NamedTuple):
    """Where a rank's neighbours connect."""

    port: int
    token: bytes
    """Proves that who connects is a neighbour."""
    key: bytes
    """Which the rank proves."""


def neighbours_of(rank: int, ring: Sequence[int], channel: int, *, both_ways: bool) -> tuple[int, int]:
    """Return the ranks before and behind this one in the ring of a channel. With `both_ways` every other one goes round
    the other way: between hosts that are joined by cables, a ring uses only one direction of each."""
    place = ring.index(rank)
    before, behind = ring[place - 1], ring[(place + 1) % len(ring)]
    return (behind, before) if both_ways and channel % 2 else (before, behind)


def make_channels(
    group: Group, ring: Sequence[int], count: int, chunk: int, envelope: Envelope, *, both_ways: bool
) -> Channels | None:
    """Return this rank's ends of `count` channels round `ring`, or None if not every rank of the group can have its
    own. Called by all ranks, in the collective of `envelope`; one that is in no ring has none."""
    routes, rank = group.routes, group.rank
    assert routes is not None
    # Of two ranks the higher one connects, as everywhere.
    rings = [neighbours_of(rank, ring, number, both_ways=both_ways) for number in range(count if ring else 0)]
    into = [(before, 2 * number + (rank > before)) for number, (before, _) in enumerate(rings)]
    out = [(behind, 2 * number + (rank < behind)) for number, (_, behind) in enumerate(rings)]
    made: dict[Place, Connection] = {}
    opened: Channels | None = None
    is_whole = False
    terms = Terms.begin(min(_SECONDS, envelope.timeout / 2), routes.credentials, Machine())
    try:
        with _listener(routes) as listener:
            offers = _exchange_offers(group, routes, rings[:1], listener, envelope)
            try:
                _connect(group, routes, [*out, *into], listener, offers, made, terms, envelope)
                opened = _over(group, made, zip(out, into, strict=True), chunk)
            except _HINDRANCES as exc:
                _log.info("Large arrays stay on one connection per link: %s", exc)
            is_whole = bool(gather_rows(group, [float(opened is not None)], envelope).all())
    except BaseException as exc:
        if not isinstance(
            exc, DistributedError
        ):  # Ctrl-C between two calls of the engine: the others wait for this rank
            group.abort(str(exc) or type(exc).__name__)
        raise
    finally:
        if not is_whole:
            if opened is not None:
                opened.close()
            for connection in made.values():
                connection.close()
    return opened if is_whole else None


def _over(group: Group, made: dict[Place, Connection], places: Iterable[tuple[Place, Place]], chunk: int) -> Channels:
    """Return channels over the connections of `made`, with the `places` of what each sends and receives on."""
    patience = patience_of(group.config.patience, DEFAULT_PATIENCE)
    wires = {place: _wire(group.members[place[0]], connection, patience) for place, connection in made.items()}
    channels = Channels([Channel(wires[a], wires[b], chunk) for a, b in places], chunk)
    when_gone(channels, _Closing(channels.all))
    return channels


@contextmanager
def _listener(routes: Routes) -> Generator[Listener | None, None, None]:
    """Listen for channels; None if this process has no descriptor left for that, which its neighbours must hear."""
    try:
        listener = Listener(routes.credentials)
    except OSError as exc:
        _log.info("Cannot listen for channels: %s", exc)
        yield None
        return
    with closing(listener):
        yield listener


class _Closing:
    """Closes channels, which are not those of a group any more."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels

    def __call__(self) -> None:
        for channel in self._channels:
            channel.close()


def _exchange_offers(
    group: Group, routes: Routes, rings: Sequence[tuple[int, int]], listener: Listener | None, envelope: Envelope
) -> dict[int, _Offer]:
    """Tell the neighbours where this rank listens, which the higher ones need; return what they tell."""
    token = secrets.token_bytes(16)
    key = b"" if routes.credentials is None else routes.credentials.identity.public_key
    offers: dict[int, _Offer] = {}
    for dst, src in (way for neighbours in rings for way in (neighbours[::-1], neighbours)):
        try:
            port = listener.port_at(routes.hosts[dst][0]) if listener is not None and dst > group.rank else 0
        except (DistributedError, OSError) as exc:
            _log.info("Cannot listen for channels: %s", exc)
            port = 0
        said = bytearray(_OFFER.size)
        group.exchange(_OFFER.pack(port, token, key), dst, said, src, envelope)
        offers[src] = _Offer(*_OFFER.unpack(said))
    offers[group.rank] = _Offer(0, token, key)
    return offers


def _connect(
    group: Group,
    routes: Routes,
    places: Sequence[Place],
    listener: Listener | None,
    offers: dict[int, _Offer],
    made: dict[Place, Connection],
    terms: Terms,
    envelope: Envelope,
) -> None:
    """Make a connection for each of `places`: first to lower ranks, in their order, so there is always one that
    accepts. Raises what prevents it."""
    rank, token = group.rank, offers[group.rank].token
    higher = [place for place in places if place[0] > rank]

    def identity_of(peer: int) -> bytes:
        return offers[peer].key if routes.credentials is not None else b""

    def place_of(connection: Connection) -> Place | Refused:
        said = connection.purpose
        if (
            not isinstance(said, ExtraConnection)
            or (said.rank, said.number) not in higher
            or not secrets.compare_digest(said.token, token)
            or connection.identity != identity_of(said.rank)
        ):
            return Refused("group", "this port is for further connections of a group that has formed")
        return said.rank, said.number

    def check(peer: int) -> None:
        group.engine.look()
        group.engine.check(envelope)
        if group.engine.links[group.members[peer]].error is not None:
            raise NoConnectionError(f"Rank {peer} has left", peer=peer)

    for peer, number in sorted(place for place in places if place[0] < rank):
        address = (routes.hosts[peer][1], offers[peer].port)
        if not address[1]:
            raise NoConnectionError(f"Rank {peer} cannot listen for channels", peer=peer)
        hello = ExtraConnection(rank, number, offers[peer].token)
        while (peer, number) not in made:
            attempt = Terms.begin(min(_ATTEMPT, terms.deadline - time.monotonic()), terms.credentials, terms.machine)
            try:
                made[peer, number] = connect(peer, [address], hello, attempt, identity=identity_of(peer))
            except RendezvousTimeoutError:
                check(peer)
                if terms.is_over:
                    raise
    if listener is None:
        raise NoConnectionError("This rank cannot listen for channels")
    what, advice = "opening channels", "the log of the missing ranks says why"
    for _ in accept_each(listener, higher, made, place_of, terms, what, advice=advice, check=check):
        pass


def _wire(peer: int, connection: Connection, patience: float) -> Wire:
    sock = keep_from_children(tune(connection.sock, is_bounded=False))
    # As those of the links: else a firewall or a NAT forgets a connection over which nothing goes during an evaluation.
    keep_alive(sock, patience)
    return Wire.over(peer, sock, connection.sealer, connection.opener)
