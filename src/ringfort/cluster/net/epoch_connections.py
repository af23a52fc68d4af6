"""`EpochConnections`: the data connections of an epoch's members, one between every two, made by the control service.

As in `bootstrap.fixed_list`, every rank connects to those below it and accepts those above it. Here all connections
arrive at the listener that the node has anyway, they are made at the same time, and they are given up at once when the
epoch ends, which a thread that waits for a connection could not do.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import Final

import msgspec

from ringfort.bootstrap.connection import Connection, closed_on_error
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.net.connector import PeerConnector
from ringfort.cluster.net.control_link import connect
from ringfort.cluster.net.host import clock
from ringfort.cluster.net.setup import Setup
from ringfort.cluster.net.waiting import run, within
from ringfort.cluster.tasks import BackgroundTasks
from ringfort.config import parse_address
from ringfort.errors import (
    AbortedError,
    DistributedError,
    HandshakeError,
    NoConnectionError,
    ProtocolError,
    RendezvousTimeoutError,
)
from ringfort.transport import tcp
from ringfort.transport.hello import Meet, Ready
from ringfort.transport.machine import Machine

MAX_EARLY: Final = 256
"""Connections of members whose program is ahead of ours. As many as an epoch has members."""
EARLY_SECONDS: Final = 60.0
"""For how long they are kept. A member whose connection is dropped connects again."""
_PAUSE: Final = 0.1
"""Seconds before a peer that could not be reached is tried again."""
_CHECK_EVERY: Final = 0.25
"""Seconds between two checks whether the accepted connections are still open."""
_SAY_WITHIN: Final = 0.1
"""Seconds for an answer to a new connection, which has room for it."""


def token_of(epoch: Epoch) -> bytes:
    """Return what members have in common only if they agree on the whole epoch, so others never meet."""
    return blake2b(msgspec.msgpack.encode(epoch), digest_size=16).digest()


@dataclass
class _Group:
    epoch: Epoch
    token: bytes
    rank: int
    machine: Machine
    connections: dict[int, Connection] = field(default_factory=dict[int, "Connection"])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    failure: DistributedError | None = None
    why: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(len(self.epoch.holders)) if rank != self.rank and rank not in self.connections]

    def why_missing(self) -> str:
        """Say which ranks are not connected, and why, as far as that is known."""
        return "; ".join(f"rank {rank}: {self.why.get(rank, 'it has not connected yet')}" for rank in self.missing)

    def drop_ended(self) -> None:
        """Drop connections that ended before all were there: those members are expected again."""
        for rank in [rank for rank, connection in self.connections.items() if tcp.is_ended(connection.sock)]:
            self.connections.pop(rank).close()


class EpochConnections:
    """Lives in the control service's loop. One group at a time."""

    def __init__(self, setup: Setup, connector: PeerConnector) -> None:
        self._setup = setup
        self._connector = connector
        self._early: list[tuple[float, Connection, Meet]] = []
        """Connections that wait for our own program, and since when."""
        self._group: _Group | None = None
        self._over: dict[tuple[int, str], str] = {}
        """Why the latest epochs have ended: their connections can never become complete."""

    def accepted(self, connection: Connection, said: Meet) -> None:
        """Take over a member's connection. It is kept until our own program is as far."""
        self._early.append((clock(), connection, said))
        self._let_in()
        oldest = clock() - EARLY_SECONDS
        while self._early and (len(self._early) > MAX_EARLY or self._early[0][0] < oldest):
            self._early.pop(0)[1].close()

    def ended(self, epoch: Epoch, why: str) -> None:
        """Give up the connections of an epoch that has ended."""
        self._over[epoch.key] = why
        while len(self._over) > MAX_EARLY:
            del self._over[next(iter(self._over))]
        if self._group is not None and self._group.epoch.key == epoch.key:
            self._fail(AbortedError(f"{epoch} has ended: {why}"))

    def close(self) -> None:
        """Give up everything."""
        for _, connection, _ in self._early:
            connection.close()
        self._early.clear()
        self._fail(AbortedError("this node was closed"))

    def _fail(self, failure: DistributedError) -> None:
        if self._group is not None:
            self._group.failure = failure
            self._group.changed.set()

    async def connect(self, epoch: Epoch, machine: Machine, timeout: float = inf) -> dict[int, Connection]:
        """Return a connection to every other holder, by its place in `epoch`; this one is on `machine`.

        Raises `AbortedError` if the epoch ends or has ended before, `RendezvousTimeoutError` with the ranks that are
        missing after `timeout` seconds and why.
        """
        deadline = clock() + timeout
        if epoch.key in self._over:
            raise AbortedError(f"{epoch} has ended: {self._over[epoch.key]}")
        group = self._group = _Group(epoch, token_of(epoch), epoch.peers.index(self._setup.peer), machine)
        connecting = BackgroundTasks()
        for rank in range(group.rank):
            connecting.start(self._connect(group, rank))
        with closed_on_error(group.connections):
            try:
                while True:
                    group.changed.clear()
                    if group.failure is not None:
                        raise group.failure
                    self._let_in()  # each time: one may wait for a place whose first connection has ended meanwhile
                    if not group.missing:
                        group.drop_ended()
                        if not group.missing:
                            return group.connections
                        for rank in group.missing:
                            if rank < group.rank:
                                connecting.start(self._connect(group, rank))
                    left = deadline - clock()
                    if left <= 0:
                        raise RendezvousTimeoutError(
                            f"connecting {epoch}", timeout, missing=group.missing, state=group.why_missing()
                        )
                    with suppress(TimeoutError):
                        await within(min(_CHECK_EVERY, left), group.changed.wait())
            finally:
                await connecting.cancel()
                if self._group is group:
                    self._group = None

    def _let_in(self) -> None:
        group = self._group
        if group is None:
            return
        for early in [early for early in self._early if secrets.compare_digest(early[2].token, group.token)]:
            _, connection, said = early
            why = self._why_not(group, connection, said.rank)
            if not why and said.rank in group.connections:
                if not tcp.is_ended(group.connections[said.rank].sock):
                    continue  # a second claim waits until the first connection has ended
                group.connections.pop(said.rank).close()
            self._early.remove(early)
            if why:
                self._connector.refused(connection.address, why)
            if why or tcp.is_ended(connection.sock):
                connection.close()
                continue
            try:
                connection.say(Ready(group.machine), time.monotonic() + _SAY_WITHIN)
            except NoConnectionError:
                connection.close()  # it has gone, and connects again
                continue
            connection.machine = said.machine
            group.connections[said.rank] = connection
            group.changed.set()

    def _why_not(self, group: _Group, connection: Connection, rank: int) -> str:
        """Return why a connection cannot be that of the member it claims to be; empty if it can."""
        if not group.rank < rank < len(group.epoch.holders):
            return f"rank {rank} does not connect to rank {group.rank}"
        # The token alone proves nothing: everyone who is told of the epoch, observers too, can compute it.
        return self._setup.other_identity(connection.identity, group.epoch.members[rank].peer)

    async def _connect(self, group: _Group, rank: int) -> None:
        member = group.epoch.members[rank]
        while rank not in group.connections:
            for address in await self._connector.ways_to(member.peer, member.addresses):
                try:
                    connection = await self._meet(group, rank, member, address)
                except DistributedError as exc:
                    group.why[rank] = f"{member.peer} at {address}: {exc}"
                else:
                    group.connections[rank] = connection
                    group.changed.set()
                    return
            await asyncio.sleep(_PAUSE)

    async def _meet(self, group: _Group, rank: int, member: Member, address: str) -> Connection:
        meet = Meet(group.rank, len(group.epoch.holders), group.token, group.machine)
        connection = await connect(*parse_address(address), self._setup.wall, meet)
        with closed_on_error({rank: connection}):
            why = self._setup.other_identity(connection.identity, member.peer)
            if why:
                raise HandshakeError(why)
            group.why[rank] = "it is connected, but its program has not come this far"
            answer = await run(connection.hearing())
            if not isinstance(answer, Ready):
                raise ProtocolError("it answered a hello with something else")
        connection.machine = answer.machine
        return connection
