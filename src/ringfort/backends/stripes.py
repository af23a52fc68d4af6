"""How ranks that are linked come to have several connections with each other: the lower one of two opens a port on the
interface that they meet on, tells the other over what they have, and lets it in there as often as agreed."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from hashlib import blake2b

from ringfort.backends.rendezvous import Channels, Terms, host_of
from ringfort.config import MAX_STRIPES, CollectiveConfig
from ringfort.errors import ConfigError, HandshakeError, ProtocolError, RendezvousTimeoutError
from ringfort.transport import tcp
from ringfort.transport.channel import Channel
from ringfort.transport.door import Door
from ringfort.transport.greeting import Stripe, Stripes
from ringfort.transport.machine import Machine, hosts_of

AUTO_STRIPES = 4
"""What `auto` weighs against one. Where a connection is held back (by a limit a flow, by a window too small for the
way) four do nearly four times as much; a wire that four cannot fill is beyond what one process can."""


def wanted(config: CollectiveConfig, machines: Mapping[int, Machine]) -> int:
    """How many connections every two ranks have: the same at all. One where all of them share memory."""
    if len(set(hosts_of(machines))) == 1 and all(machine.shares for machine in machines.values()):
        return 1
    return AUTO_STRIPES if config.stripes == "auto" else config.stripes


def open_stripes(rank: int, channels: Channels, count: int, terms: Terms) -> list[Channels]:
    """The further sets of channels, `count - 1` of them. Called by all ranks, with nothing else said on `channels`.

    Raises `ConfigError` if a rank wants another number, `HandshakeError` if one has met another machine in the place of
    a rank, `TransportError` if one goes away.
    """
    token = secrets.token_bytes(16)
    members = _digest(rank, channels, terms)
    doors: dict[str, Door] = {}
    sets: list[Channels] = [{} for _ in range(count - 1)]
    try:
        # All speak before anybody listens: so nobody waits in a circle.
        for peer, channel in sorted(channels.items()):
            port = _door_for(channel, doors, terms).address[1] if sets and peer > rank else 0
            channel.say(Stripes(count, port, token, members), terms.deadline)
        said = {peer: _hear(peer, channel, count, members, terms) for peer, channel in sorted(channels.items())}
        # Everybody comes to the lowest first and then to the next: so there is always one who lets in.
        for peer in sorted(peer for peer in channels if sets and peer < rank):
            for number, others in enumerate(sets, start=1):
                others[peer] = _knock(rank, peer, channels[peer], number, said[peer], terms)
        for host, door in doors.items():
            _accept(door, {p: c for p, c in channels.items() if p > rank and _own_host(c) == host}, sets, token, terms)
    except BaseException:
        for others in sets:
            for channel in others.values():
                channel.close()
        raise
    finally:
        for door in doors.values():
            door.close()
    return sets


def _door_for(channel: Channel, doors: dict[str, Door], terms: Terms) -> Door:
    """Where the peer comes in: at the address that it knows us by, so that all goes the same way."""
    host = _own_host(channel)
    if host not in doors:
        doors[host] = Door(tcp.listen(host, 0), terms.credentials)
    return doors[host]


def _own_host(channel: Channel) -> str:
    return host_of(channel.sock.getsockname())


def _digest(rank: int, channels: Channels, terms: Terms) -> bytes:
    """Of the keys that all ranks have proved, in order: where nobody hands out a list of them (`RingBackend`), this is
    how the ranks notice that another machine holds a rank's place at some of them."""
    proved = {peer: channel.identity for peer, channel in channels.items()}
    proved[rank] = terms.credentials.identity.public_key if terms.credentials else b""
    return blake2b(b"".join(proved[peer] for peer in sorted(proved)), digest_size=16).digest()


def _hear(peer: int, channel: Channel, count: int, members: bytes, terms: Terms) -> Stripes:
    said = channel.hear(f"rank {peer}", terms.deadline)
    if not isinstance(said, Stripes):
        raise ProtocolError(f"rank {peer} says something else than how many stripes it wants", peer=peer)
    if said.count != count:
        raise ConfigError("stripes", count, f"rank {peer} has {said.count}; set the same on all ranks")
    if not secrets.compare_digest(said.members, members):
        why = f"rank {peer} and this rank are connected with different machines"
        raise HandshakeError(f"{why}; somebody else holds a rank's place at one of them", peer=peer)
    return said


def _knock(rank: int, peer: int, first: Channel, number: int, said: Stripes, terms: Terms) -> Channel:
    sock: socket.socket | None = None
    try:
        sock = tcp.connect([(host_of(first.sock.getpeername()), said.port)], terms.deadline)
        purpose = Stripe(rank, number, said.token)
        channel = Channel.open(sock, terms.credentials, purpose, f"rank {peer}", terms.deadline)
        if channel.identity != first.identity:
            raise ProtocolError(f"somebody else answers at the port of rank {peer}", peer=peer)
    except BaseException:
        if sock is not None:
            sock.close()
        raise
    channel.machine = first.machine
    return channel


def _accept(door: Door, higher: Channels, sets: list[Channels], token: bytes, terms: Terms) -> None:
    """Lets in each of `higher` once for each of `sets`."""
    while missing := [peer for peer in higher if any(peer not in others for others in sets)]:
        if terms.is_over:
            raise RendezvousTimeoutError("opening further connections", terms.timeout, missing=missing)
        for arrival in door.wait(terms.deadline)[0]:
            said, channel = arrival.said, arrival.channel
            if (
                not isinstance(said, Stripe)
                or said.rank not in higher
                or not 1 <= said.number <= len(sets)
                or said.rank in sets[said.number - 1]
                or not secrets.compare_digest(said.token, token)
                or channel.identity != higher[said.rank].identity
            ):
                door.refuse(arrival, "group", "this port is for further connections of a group that has formed")
                continue
            channel.machine = higher[said.rank].machine
            sets[said.number - 1][said.rank] = channel


assert AUTO_STRIPES <= MAX_STRIPES
