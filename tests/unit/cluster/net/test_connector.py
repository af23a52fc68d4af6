"""What a connector makes of what it hears, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ringfort.cluster.discovery.interfaces import Choice, Interface
from ringfort.cluster.discovery.mdns import Announcement
from ringfort.cluster.net import connector as connector_module
from ringfort.cluster.net.connector import MAX_REFUSALS, PeerConnector
from ringfort.cluster.net.setup import Setup
from ringfort.config import AutoDiscoveryConfig
from ringfort.errors import DistributedError, NamespaceMismatchError, NoConnectionError
from tests.helpers.handshakes import member

WIRE = Interface(name="eth0", index=2, addresses=("10.0.0.1",), prefixes=(24,))
FIRST, LAST = "0" * 16, "z" * 16
"""Tokens below and above every other."""


class Attempts:
    """Every attempt to connect ends as `outcome` says; None leaves it under way."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.outcome: DistributedError | None = None

    async def __call__(self, host: str, port: int, *_: object) -> Any:
        self.addresses.append(f"{host}:{port}")
        if self.outcome is None:
            await asyncio.Event().wait()
        raise self.outcome or AssertionError


def run(scene: Callable[[PeerConnector], Awaitable[None]]) -> None:
    async def main() -> None:
        setup = Setup.make(AutoDiscoveryConfig(multicast=False), 1, member())
        connector = PeerConnector(setup, lambda *_: None, lambda _: None, lambda *_: None)
        connector.choice = Choice((WIRE,))
        try:
            await scene(connector)
        finally:
            await connector.close()

    asyncio.run(main())


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    made = Attempts()
    monkeypatch.setattr(connector_module, "connect", made)
    return made


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_one_with_the_lower_token_connects_and_the_other_waits_a_moment(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(connector: PeerConnector) -> None:
        later: list[Callable[[], None]] = []
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_later", lambda seconds, action: later.append(action))
            connector._heard(Announcement("", FIRST, ("10.0.0.2",), 7))
        await turns()
        assert attempts.addresses == []
        connector._heard(Announcement("", LAST, ("10.0.0.3",), 7))
        await turns()
        assert attempts.addresses == ["10.0.0.3:7"]
        later[0]()  # the other has not come
        await turns()
        assert attempts.addresses == ["10.0.0.3:7", "10.0.0.2:7"]

    run(scene)


def test_addresses_that_are_announced_no_more_are_forgotten(attempts: Attempts) -> None:
    async def scene(connector: PeerConnector) -> None:
        connector._heard(Announcement("", LAST, ("10.0.0.2", "10.0.0.3"), 7))
        connector._heard(Announcement("", LAST, ("10.0.0.3", "10.0.0.4"), 7))
        assert sorted(connector.directory.addresses(LAST)) == ["10.0.0.3:7", "10.0.0.4:7"]
        connector.directory.withdraw(LAST)
        assert connector.directory.addresses(LAST) == []

    run(scene)


def test_what_is_no_address_is_not_learnt(attempts: Attempts) -> None:
    async def scene(connector: PeerConnector) -> None:
        connector.learn(f"node.{LAST}", ["nonsense", "10.0.0.2:0", ":::", "10.0.0.2:7"], "somebody")
        assert connector.directory.addresses(LAST) == ["10.0.0.2:7"]

    run(scene)


def test_who_refuses_is_remembered_and_who_is_not_there_is_not(attempts: Attempts) -> None:
    async def scene(connector: PeerConnector) -> None:
        attempts.outcome = NamespaceMismatchError("another cluster")
        await connector._connect("10.0.0.2:7")
        await connector._connect("10.0.0.2:7")
        attempts.outcome = NoConnectionError("Connection refused")
        await connector._connect("10.0.0.3:7")
        assert list(connector.refusals) == ["10.0.0.2:7: another cluster"]

    run(scene)


def test_of_one_that_keeps_coming_one_line_is_kept_and_of_many_the_last(attempts: Attempts) -> None:
    async def scene(connector: PeerConnector) -> None:
        for port in (1, 2, 3):
            connector.refused(f"10.0.0.2:{port}", "not Ringfort")
        connector.refused("10.0.0.2:4", "another cluster")
        assert list(connector.refusals) == ["10.0.0.2:3: not Ringfort", "10.0.0.2:4: another cluster"]
        for host in range(100):
            connector.refused(f"10.0.1.{host}:1", "not Ringfort")
        assert len(connector.refusals) == MAX_REFUSALS

    run(scene)


def test_a_connector_that_is_closed_connects_to_nobody(attempts: Attempts) -> None:
    async def scene(connector: PeerConnector) -> None:
        await connector.close()
        connector._heard(Announcement("", LAST, ("10.0.0.2",), 7))
        await turns()
        assert attempts.addresses == []

    run(scene)
