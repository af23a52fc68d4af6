"""The data connections of an epoch: a place is for the identity that the epoch names, at both ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import cast

import pytest

from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.listener import Listener
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.net import waiting
from ringfort.cluster.net.connector import PeerConnector
from ringfort.cluster.net.control_link import connect
from ringfort.cluster.net.control_listener import ControlListener
from ringfort.cluster.net.epoch_connections import MAX_EARLY, EpochConnections, token_of
from ringfort.cluster.net.setup import Setup
from ringfort.cluster.net.waiting import run
from ringfort.config import AutoDiscoveryConfig, parse_address
from ringfort.errors import AbortedError, DistributedError, NoConnectionError
from ringfort.identity.credentials import Credentials
from ringfort.transport.hello import Meet, Ready
from ringfort.transport.machine import Machine
from tests.helpers.handshakes import member

PATIENCE = 20.0
HERE = Machine()


class Node:
    """Who accepts connections for an epoch: the parts of a node that this takes, on loopback."""

    def __init__(self, credentials: Credentials | None = None, encryption: str = "on") -> None:
        config = AutoDiscoveryConfig(encryption=encryption)  # type: ignore[arg-type]
        self.setup = Setup.make(config, 1, credentials or member())
        self.refused: list[str] = []
        self.ways: dict[str, list[str]] = {}
        """Where a peer is said to be, where that is not what the epoch says."""
        self.links = EpochConnections(self.setup, cast("PeerConnector", _Ways(self)))
        self.listener = ControlListener(Listener(self.setup.wall, on_refused=lambda where, why: None), self._accepted)
        self.listener.open(["127.0.0.1"], 0)
        self.address = self.listener.addresses[0]
        self.accepted: list[Meet] = []
        self.changed = asyncio.Event()

    def _accepted(self, connection: Connection) -> None:
        said = connection.purpose
        assert isinstance(said, Meet)
        self.links.accepted(connection, said)
        self.accepted.append(said)
        self.changed.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), PATIENCE)

    async def close(self) -> None:
        self.listener.close()
        self.links.close()


class _Ways:
    """What a `PeerConnector` does for a group that forms."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def ways_to(self, peer: str, addresses: Sequence[str]) -> list[str]:
        return self._node.ways.get(peer, list(addresses))

    def refused(self, address: str, why: str) -> None:
        self._node.refused.append(why)


def epoch_of(nodes: Iterable[Node]) -> Epoch:
    members = tuple(Member(node.setup.peer, addresses=(node.address,)) for node in nodes)
    return Epoch(1, members[0].peer, members)


def with_nodes(count: int, scene: Callable[..., Awaitable[None]], encryption: str = "on") -> None:
    async def main() -> None:
        nodes = [Node(encryption=encryption) for _ in range(count)]
        try:
            await asyncio.wait_for(scene(epoch_of(nodes), *nodes), PATIENCE)
        finally:
            for node in nodes:
                await node.close()

    asyncio.run(main())


async def claim(node: Node, epoch: Epoch, rank: int, credentials: Credentials | None) -> Connection:
    """A member that knows the epoch claims to be `rank`."""
    host, port = parse_address(node.address)
    return await connect(host, port, credentials, Meet(rank, len(epoch.members), token_of(epoch), HERE))


def close_all(formed: Sequence[dict[int, Connection]]) -> None:
    for connections in formed:
        for connection in connections.values():
            connection.close()


async def refusal(connection: Connection) -> DistributedError:
    with connection.sock, pytest.raises(NoConnectionError) as raised:
        await run(connection.hearing())
    return raised.value


def test_who_is_in_no_epoch_does_not_get_a_members_place_and_the_member_does() -> None:
    """The observer has the cluster's secret and a key of its own, and comes first."""

    async def scene(epoch: Epoch, first: Node, second: Node) -> None:
        observer = await claim(first, epoch, 1, member())
        await first.until(lambda: len(first.accepted) == 1)
        forming = asyncio.ensure_future(first.links.connect(epoch, HERE))
        await refusal(observer)
        formed = await asyncio.gather(forming, second.links.connect(epoch, HERE))
        assert formed[0][1].identity == second.setup.credentials.identity.public_key
        assert formed[1][0].identity == first.setup.credentials.identity.public_key
        assert len(first.refused) == 1
        assert f"not {second.setup.peer}" in first.refused[0]
        close_all(formed)

    with_nodes(2, scene)


@pytest.mark.parametrize("is_same", [False, True], ids=["another identity", "the same identity"])
def test_a_member_that_has_its_place_keeps_it_whoever_claims_it_next(is_same: bool) -> None:
    async def scene(epoch: Epoch, first: Node, second: Node, third: Node) -> None:
        forming = [asyncio.ensure_future(node.links.connect(epoch, HERE)) for node in (first, second)]
        await first.until(lambda: len(first.accepted) == 1)  # the second; the third is waited for
        connection = await claim(first, epoch, 1, second.setup.credentials if is_same else member())
        await first.until(lambda: len(first.accepted) == 2)
        if not is_same:
            await refusal(connection)
        formed = await asyncio.gather(*forming, third.links.connect(epoch, HERE))
        here, there = formed[0][1].sock, formed[1][0].sock
        assert here.getpeername() == there.getsockname()
        connection.close()
        close_all(formed)

    with_nodes(3, scene)


def test_a_member_whose_first_connection_has_ended_gets_its_place_again() -> None:
    async def scene(epoch: Epoch, first: Node, second: Node, third: Node) -> None:
        forming = asyncio.ensure_future(first.links.connect(epoch, HERE))
        connection = await claim(first, epoch, 1, second.setup.credentials)
        assert isinstance(await run(connection.hearing()), Ready)
        connection.close()
        formed = await asyncio.gather(forming, *(node.links.connect(epoch, HERE) for node in (second, third)))
        assert formed[0][1].sock.getpeername() == formed[1][0].sock.getsockname()
        close_all(formed)

    with_nodes(3, scene)


def test_who_answers_in_a_members_place_with_another_identity_gets_no_connection() -> None:
    """As when an address was given to another machine, or a member claims it."""

    async def scene(epoch: Epoch, first: Node, second: Node, other: Node) -> None:
        two = Epoch(1, epoch.leader, epoch.members[:2])
        second.ways[first.setup.peer] = [other.address, first.address]
        formed = await asyncio.gather(first.links.connect(two, HERE), second.links.connect(two, HERE))
        assert formed[1][0].identity == first.setup.credentials.identity.public_key
        close_all(formed)

    with_nodes(3, scene)


def test_with_encryption_off_there_is_no_identity_and_members_still_meet() -> None:
    async def scene(epoch: Epoch, first: Node, second: Node) -> None:
        formed = await asyncio.gather(first.links.connect(epoch, HERE), second.links.connect(epoch, HERE))
        assert [connections[1 - rank].identity for rank, connections in enumerate(formed)] == [b"", b""]
        close_all(formed)

    with_nodes(2, scene, encryption="off")


def numbered(epoch: Epoch, number: int) -> Epoch:
    return Epoch(number, epoch.leader, epoch.members)


def test_an_epoch_that_ended_before_the_forming_began_is_not_waited_for() -> None:
    async def scene(epoch: Epoch, first: Node, _: Node) -> None:
        first.links.ended(epoch, "contact is lost")
        with pytest.raises(AbortedError, match="epoch 1 of 2 has ended: contact is lost"):
            await first.links.connect(epoch, HERE)

    with_nodes(2, scene)


def test_an_epoch_that_ends_while_it_forms_is_given_up_and_another_is_not() -> None:
    async def scene(epoch: Epoch, first: Node, second: Node) -> None:
        later = numbered(epoch, 2)
        forming = asyncio.ensure_future(first.links.connect(later, HERE))
        await asyncio.sleep(0)  # it has begun
        first.links.ended(epoch, "it was before")
        formed = await asyncio.gather(forming, second.links.connect(later, HERE))
        close_all(formed)
        last = numbered(epoch, 3)
        forming = asyncio.ensure_future(first.links.connect(last, HERE))
        await asyncio.sleep(0)
        first.links.ended(last, "somebody left")
        with pytest.raises(AbortedError, match="epoch 3 of 2 has ended: somebody left"):
            await forming

    with_nodes(2, scene)


@pytest.mark.parametrize("before", range(4))
def test_an_epoch_that_ends_just_when_a_connection_is_refused_is_given_up(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a member is killed: its word and its refusal come together. `before`: turns of the loop between them."""

    async def scene(epoch: Epoch, first: Node, second: Node) -> None:
        refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def ready(sock: object, event: int, deadline: float | None) -> None:
            await asyncio.wait({refused})
            refused.result()

        monkeypatch.setattr(waiting, "_ready", ready)
        forming = asyncio.ensure_future(second.links.connect(epoch, HERE))
        for _ in range(8):  # it waits for its connection
            await asyncio.sleep(0)
        second.links.ended(epoch, "contact is lost")
        for _ in range(before):
            await asyncio.sleep(0)
        refused.set_exception(ConnectionRefusedError())
        with pytest.raises(AbortedError, match="epoch 1 of 2 has ended: contact is lost"):
            await forming
        refused.exception()  # perhaps nobody was there to take it

    with_nodes(2, scene)


def test_only_the_latest_ends_of_epochs_are_remembered() -> None:
    async def scene(epoch: Epoch, first: Node) -> None:
        for number in range(1, MAX_EARLY + 10):
            first.links.ended(numbered(epoch, number), "over")
        assert len(first.links._over) == MAX_EARLY

    with_nodes(1, scene)
