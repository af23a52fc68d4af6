"""Streams between two peers: who gets one, and what the others are told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import pytest

from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.listener import Listener
from ringfort.cluster.core.contacts import Contact, Contacts
from ringfort.cluster.core.peer_messages import Hello, Member
from ringfort.cluster.net.connector import PeerConnector
from ringfort.cluster.net.control_link import connect
from ringfort.cluster.net.control_listener import ControlListener
from ringfort.cluster.net.peer_streams import MAX_PENDING, PeerStreams
from ringfort.cluster.net.setup import Setup
from ringfort.cluster.net.waiting import run
from ringfort.config import AutoDiscoveryConfig, parse_address
from ringfort.errors import HandshakeError, NoConnectionError, OperationTimeoutError, RefusedError
from ringfort.identity.credentials import Credentials
from ringfort.transport.hello import OpenStream, Ready
from tests.helpers.handshakes import member

PATIENCE = 20.0


class Node:
    """The parts of a node that streams need, on loopback, and the streams that its program has."""

    def __init__(self, name_of_run: str = "") -> None:
        self.setup = Setup.make(AutoDiscoveryConfig(run=name_of_run), 1, member())
        self.peer = self.setup.peer
        self.contacts = Contacts(self.setup.member())
        self.connector = _Connector()
        self.received: list[tuple[str, str, Connection]] = []
        self.takes = True
        self.streams = PeerStreams(self.setup, cast("PeerConnector", self.connector), self.contacts, self._take)
        self.listener = ControlListener(Listener(self.setup.wall, on_refused=lambda where, why: None), self._accepted)
        self.listener.open(["127.0.0.1"], 0)
        self.address = self.listener.addresses[0]

    def meets(self, other: Node, address: str = "") -> None:
        """Gives this node a control link with `other`, which it believes to be at `address`."""
        told = Hello(Member(other.peer, addresses=(address or other.address,)), run=other.setup.config.run)
        self.contacts.introduce(Contact(1, other.setup.credentials.identity.peer_id, True, 0.0), told)

    def _accepted(self, connection: Connection) -> None:
        assert isinstance(connection.purpose, OpenStream)
        self.streams.accepted(connection, connection.purpose)

    def _take(self, peer: str, purpose: str, connection: Connection) -> None:
        self.received.append((peer, purpose, connection))
        if self.takes:
            connection.say(Ready(), time.monotonic() + PATIENCE)
            self.streams.taken()

    def close(self) -> None:
        self.listener.close()
        for _, _, connection in self.received:
            connection.close()


class _Connector:
    """What a `PeerConnector` does for streams."""

    def __init__(self) -> None:
        self.refusals: list[str] = []

    async def ways_to(self, peer: str, addresses: Sequence[str]) -> list[str]:
        return list(addresses)

    def refused(self, address: str, why: str) -> None:
        self.refusals.append(why)


def with_nodes(scene: Callable[..., Awaitable[None]], *runs: str) -> None:
    async def main() -> None:
        nodes = [Node(name) for name in runs]
        try:
            await asyncio.wait_for(scene(*nodes), PATIENCE)
        finally:
            for node in nodes:
                node.close()

    asyncio.run(main())


async def refusal(to: Node, said: OpenStream, credentials: Credentials | None) -> str:
    """What a peer is told that asks for a stream and must not get it."""
    connection = await connect(*parse_address(to.address), credentials, said)
    with connection.sock, pytest.raises(RefusedError) as raised:
        await run(connection.hearing("it"), PATIENCE)
    return str(raised.value)


def test_a_connected_peer_gets_a_stream_and_the_receiver_knows_from_whom_and_for_what() -> None:
    async def scene(one: Node, two: Node) -> None:
        one.meets(two)
        two.meets(one)
        connection = await one.streams.open(two.peer, "state", PATIENCE)
        with connection.sock:
            ((peer, purpose, other),) = two.received
            assert (peer, purpose) == (one.peer, "state")
            assert other.identity == one.setup.credentials.identity.public_key
            assert connection.identity == two.setup.credentials.identity.public_key

    with_nodes(scene, "", "")


def test_without_a_control_link_there_is_no_stream() -> None:
    async def scene(one: Node, two: Node) -> None:
        with pytest.raises(NoConnectionError, match=two.peer):
            await one.streams.open(two.peer, "state", PATIENCE)
        one.meets(two)
        with pytest.raises(RefusedError, match=f"{two.peer}: .*control link"):
            await one.streams.open(two.peer, "state", PATIENCE)
        assert not two.received
        assert len(two.connector.refusals) == 1

    with_nodes(scene, "", "")


def test_peers_of_two_runs_have_no_stream() -> None:
    async def scene(one: Node, two: Node) -> None:
        one.meets(two)
        two.meets(one)
        with pytest.raises(NoConnectionError, match="another run"):
            await one.streams.open(two.peer, "state", PATIENCE)
        said = OpenStream(one.peer, two.peer, "state")
        assert "different runs" in await refusal(two, said, one.setup.wall)

    with_nodes(scene, "a", "b")


def test_a_peer_that_claims_to_be_another_or_means_another_is_refused() -> None:
    async def scene(one: Node, two: Node) -> None:
        two.meets(one)
        said = OpenStream(one.peer, two.peer, "state")
        assert "proved to be" in await refusal(two, said, member())
        said = OpenStream(one.peer, "somebody.else", "state")
        assert two.peer in await refusal(two, said, one.setup.wall)
        said = OpenStream(one.peer, two.peer, "x" * 1000)
        assert "characters" in await refusal(two, said, one.setup.wall)
        assert not two.received

    with_nodes(scene, "", "")


def test_a_stream_does_not_go_to_another_machine_at_the_peers_address() -> None:
    async def scene(one: Node, two: Node, other: Node) -> None:
        one.meets(two, other.address)
        with pytest.raises(HandshakeError, match=two.peer):
            await one.streams.open(two.peer, "state", PATIENCE)

    with_nodes(scene, "", "", "")


def test_a_peer_that_cannot_be_reached_or_whose_program_does_not_take_the_stream_is_named_at_the_deadline() -> None:
    async def scene(one: Node, two: Node) -> None:
        two.meets(one)
        two.takes = False
        for address in (two.address, "127.0.0.1:1"):
            one.contacts = one.streams._contacts = Contacts(one.setup.member())
            one.meets(two, address)
            with pytest.raises(OperationTimeoutError, match=two.peer) as raised:
                await one.streams.open(two.peer, "state", 0.05)
            assert raised.value.peer == two.peer

    with_nodes(scene, "", "")


def test_no_more_streams_wait_for_a_program_than_there_is_room_for() -> None:
    async def scene(one: Node, two: Node) -> None:
        two.meets(one)
        two.takes = False
        said = OpenStream(one.peer, two.peer, "state")
        waiting = [await connect(*parse_address(two.address), one.setup.wall, said) for _ in range(MAX_PENDING)]
        assert "wait for its program" in await refusal(two, said, one.setup.wall)
        for _ in waiting:
            two.streams.taken()
        two.takes = True
        one.meets(two)
        (await one.streams.open(two.peer, "state", PATIENCE)).close()
        for connection in waiting:
            connection.close()

    with_nodes(scene, "", "")
