"""`Forming`: the data connections of an epoch's members, one between every two, made by the control service.

As in `backends.rendezvous`, every rank connects to those below it and lets in those above it. Here every connection
comes to the listener that the cluster has anyway; each is made on its own, at the same time as the others; and all is
given up at once when the epoch ends, which a thread that waits in `connect` could not do.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from ringfort.cluster.core.contacts import node_of
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.net.connector import Finder
from ringfort.cluster.net.control_link import dial, hear
from ringfort.cluster.net.host import clock
from ringfort.cluster.net.setup import Setup
from ringfort.cluster.net.waiting import within
from ringfort.config import format_address, parse_address
from ringfort.errors import AbortedError, DistributedError, HandshakeError
from ringfort.transport import hello, tcp
from ringfort.transport.handshake import Handshake, sealed
from ringfort.transport.hello import Meet, Ready
from ringfort.transport.machine import Machine

MAX_EARLY: Final = 256
"""Connections of members whose program is ahead of ours. As many as an epoch has members."""
EARLY_SECONDS: Final = 60.0
"""For which they are kept. One that is dropped comes again."""
_PAUSE: Final = 0.1
"""Seconds before a peer that could not be reached is tried again."""
_LOOK: Final = 0.25
"""Seconds between two looks whether those who came are still there."""


def token_of(epoch: Epoch) -> bytes:
    """What only the members of this very epoch know alike: two that disagree about a rank never meet."""
    return blake2b(msgspec.msgpack.encode(epoch), digest_size=16).digest()


class Seat(NamedTuple):
    """A connection to a member, and on which machine that is."""

    sock: socket.socket
    handshake: Handshake
    machine: Machine


@dataclass
class _Caller:
    sock: socket.socket
    handshake: Handshake
    said: Meet
    came: float = field(default_factory=clock)


@dataclass
class _Group:
    epoch: Epoch
    token: bytes
    rank: int
    machine: Machine
    seats: dict[int, Seat] = field(default_factory=dict[int, "Seat"])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    failure: DistributedError | None = None
    why: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(len(self.epoch.members)) if rank != self.rank and rank not in self.seats]

    def drop_ended(self) -> None:
        """One that has gone before all were there is expected again."""
        for rank, (sock, _, _) in tuple(self.seats.items()):
            if tcp.is_ended(sock):
                del self.seats[rank]
                sock.close()


class Forming:
    """Lives in the control service's loop. One group at a time."""

    def __init__(self, setup: Setup, finder: Finder) -> None:
        self._setup = setup
        self._finder = finder
        self._early: list[_Caller] = []
        self._group: _Group | None = None
        self._over: dict[tuple[int, str], str] = {}
        """Why the latest epochs have ended: what their members should form in them would never come about."""

    def came(self, sock: socket.socket, handshake: Handshake, said: Meet) -> None:
        """A member connects. Kept until our own program is as far."""
        self._early.append(_Caller(sock, handshake, said))
        self._let_in()
        oldest = clock() - EARLY_SECONDS
        while self._early and (len(self._early) > MAX_EARLY or self._early[0].came < oldest):
            self._early.pop(0).sock.close()

    def missing(self) -> dict[int, str]:
        """The ranks of the group that forms which there is no connection with, and what is known of why."""
        group = self._group
        return {} if group is None else {rank: group.why.get(rank, "it has not come yet") for rank in group.missing}

    def ended(self, epoch: Epoch, why: str) -> None:
        """The epoch is over, and what forms in it."""
        self._over[epoch.key] = why
        while len(self._over) > MAX_EARLY:
            del self._over[next(iter(self._over))]
        if self._group is not None and self._group.epoch.key == epoch.key:
            self._group.failure = AbortedError(f"{epoch} has ended: {why}")
            self._group.changed.set()

    def close(self) -> None:
        """Gives up."""
        for caller in self._early:
            caller.sock.close()
        self._early.clear()
        if self._group is not None:
            self._group.failure = AbortedError("this node was closed")
            self._group.changed.set()

    async def form(self, epoch: Epoch, machine: Machine) -> dict[int, Seat]:
        """A connection to every other member, by its place in `epoch`; this one is on `machine`. Cancel it to give up.

        Raises `AbortedError` when the epoch ends, or has ended before this began.
        """
        if epoch.key in self._over:
            raise AbortedError(f"{epoch} has ended: {self._over[epoch.key]}")
        group = self._group = _Group(epoch, token_of(epoch), epoch.peers.index(self._setup.peer), machine)
        knocking = [asyncio.ensure_future(self._connect(group, rank)) for rank in range(group.rank)]
        done = False
        try:
            while True:
                group.changed.clear()
                if group.failure is not None:
                    raise group.failure
                self._let_in()  # at each look: one may wait for a place whose first connection has ended meanwhile
                if not group.missing:
                    group.drop_ended()
                    done = not group.missing
                    if done:
                        return group.seats
                    below = [rank for rank in group.missing if rank < group.rank]
                    knocking += [asyncio.ensure_future(self._connect(group, rank)) for rank in below]
                await _wait(group.changed, _LOOK)
        finally:
            for task in knocking:
                task.cancel()
            await asyncio.gather(*knocking, return_exceptions=True)
            if not done:
                for sock, _, _ in group.seats.values():
                    sock.close()
            if self._group is group:
                self._group = None

    def _let_in(self) -> None:
        group = self._group
        if group is None:
            return
        for caller in [caller for caller in self._early if secrets.compare_digest(caller.said.token, group.token)]:
            rank = caller.said.rank
            why = self._why_not(group, caller)
            if not why and rank in group.seats:
                if not tcp.is_ended(group.seats[rank].sock):
                    continue  # a second claim waits until the first connection has ended
                group.seats.pop(rank).sock.close()
            self._early.remove(caller)
            if why or tcp.is_ended(caller.sock):
                self._turn_away(caller, why)
                continue
            try:
                caller.sock.send(sealed(caller.handshake.sealer, hello.encode(Ready(group.machine))))
            except OSError:
                caller.sock.close()  # it has gone, and comes again
                continue
            group.seats[rank] = Seat(caller.sock, caller.handshake, caller.said.machine)
            group.changed.set()

    def _why_not(self, group: _Group, caller: _Caller) -> str:
        """Why this connection cannot be the member's that it claims to be; empty if it can."""
        rank = caller.said.rank
        if not group.rank < rank < len(group.epoch.members):
            return f"rank {rank} does not connect to rank {group.rank}"
        return self._other_identity(caller.handshake, group.epoch.members[rank])

    def _other_identity(self, handshake: Handshake, member: Member) -> str:
        """Say so if the connection proved another identity than the member's. The token alone proves nothing: whoever
        is told of the epoch, an observer too, can compute it. With encryption off there is no identity to compare."""
        try:
            proved = self._setup.proved(handshake)
        except HandshakeError as exc:
            return str(exc)
        is_right = self._setup.wall is None or proved == node_of(member.peer)
        return "" if is_right else f"it proved to be {proved}, not {member.peer}"

    def _turn_away(self, caller: _Caller, why: str) -> None:
        if why:
            with suppress(OSError):  # it may have gone
                self._finder.refused(format_address(*caller.sock.getpeername()[:2]), why)
        caller.sock.close()

    async def _connect(self, group: _Group, rank: int) -> None:
        member = group.epoch.members[rank]
        meet = Meet(group.rank, len(group.epoch.members), group.token, group.machine)
        while rank not in group.seats:
            for address in await self._finder.ways_to(member.peer, member.addresses):
                seat = await self._meet(group, rank, member, address, meet)
                if seat is not None:
                    group.seats[rank] = seat
                    group.changed.set()
                    return
            await asyncio.sleep(_PAUSE)

    async def _meet(self, group: _Group, rank: int, member: Member, address: str, meet: Meet) -> Seat | None:
        host, port = parse_address(address)
        sock: socket.socket | None = None
        try:
            sock, handshake = await dial(host, port, self._setup.wall, meet)
            why = self._other_identity(handshake, member)
            if why:
                raise HandshakeError(why)
            group.why[rank] = "it is connected, but its program has not come this far"
            answer = await hear(sock, handshake)
            if isinstance(answer, Ready):
                return Seat(sock, handshake, answer.machine)
        except DistributedError as exc:
            group.why[rank] = f"{member.peer} at {address}: {exc}"
        except BaseException:
            if sock is not None:
                sock.close()
            raise
        if sock is not None:
            sock.close()
        return None


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await within(seconds, event.wait())
