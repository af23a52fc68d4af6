"""`AutoDiscoveryBackend` and `join`, without a network: how many there must be, and what the environment says."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

import ringfort
from ringfort.bootstrap.connection import Connection
from ringfort.cluster import backend as module
from ringfort.cluster.backend import AutoDiscoveryBackend
from ringfort.cluster.core.events import EpochEnded
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.config import AutoDiscoveryConfig, DistributedConfig
from ringfort.errors import EpochEndedError, NoConnectionError, RendezvousTimeoutError
from ringfort.testing.ranks import at_once
from ringfort.transport import tcp
from ringfort.transport.hello import OfferConnections


class Leaving:
    """A backend some of whose peers leave between the two phases: worlds of these sizes are established."""

    def __init__(self, *worlds: int) -> None:
        self.worlds = list(worlds)
        self.world_size = 1
        self.waited: list[int] = []

    def wait_for_peers(self, n: int, timeout: float) -> None:
        assert timeout <= 5.0
        self.waited.append(n)
        if not self.worlds:
            raise RendezvousTimeoutError("waiting for 2 other peers", 5.0)

    def establish_ring(self, timeout: float) -> None:
        assert timeout <= 5.0
        self.world_size = self.worlds.pop(0)


def test_a_ring_that_lost_a_peer_while_it_was_formed_is_not_taken() -> None:
    backend = Leaving(2, 1, 4)
    AutoDiscoveryBackend.join_group(cast("Any", backend), 2, 5.0)
    assert (backend.world_size, backend.waited) == (4, [2, 2, 2])


def test_who_stays_away_until_the_end_is_waited_for_until_the_end() -> None:
    with pytest.raises(RendezvousTimeoutError):
        AutoDiscoveryBackend.join_group(cast("Any", Leaving(2)), 2, 5.0)


class Recorder:
    """In place of the backend that `join` makes."""

    def __init__(self, config: AutoDiscoveryConfig, *, group: DistributedConfig, encryption: str | None) -> None:
        made.append((config, group))

    def join_group(self, min_peers: int, timeout: float) -> None:
        raise RuntimeError("far enough")

    def close(self) -> None:
        pass


made: list[tuple[AutoDiscoveryConfig, DistributedConfig]] = []


def joined(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], **keywords: Any) -> tuple[float, float, str]:
    """Seconds to meet in, seconds of a call, and whether memory is shared."""
    monkeypatch.setattr(module, "AutoDiscoveryBackend", Recorder)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="far enough"):
        ringfort.join(**keywords)
    config, group = made.pop()
    return config.timeout, group.timeout, group.shared_memory


def test_join_does_as_the_environment_says_where_nothing_else_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = DistributedConfig()
    assert joined(monkeypatch, {}) == (30.0, usual.timeout, "on")
    assert joined(monkeypatch, {"RINGFORT_TIMEOUT": "7", "RINGFORT_SHM": "off"}) == (7.0, 7.0, "off")
    assert joined(monkeypatch, {}, timeout=3.0) == (3.0, 7.0, "off")
    assert joined(monkeypatch, {}, group=DistributedConfig(timeout=4.0)) == (7.0, 4.0, "off")
    off = DistributedConfig(shared_memory="off")
    assert joined(monkeypatch, {"RINGFORT_SHM": "on"}, group=off) == (7.0, 7.0, "off")


# --- an epoch that ends while its members agree on their connections --------------------------------------------------

EPOCH = Epoch(1, "a.1", (Member("a.1"), Member("b.1")))


class Connected:
    """A node that is connected with the other member of an epoch, of which nothing is heard any more."""

    peer_id, credentials = "a.1", None
    config = AutoDiscoveryConfig(encryption="off")

    def __init__(self) -> None:
        self.epoch: Epoch | None = EPOCH
        self.tell: Callable[[Any], None] = lambda event: None
        with tcp.listen("127.0.0.1", 0) as listener:
            listener.setblocking(True)
            ends = at_once(lambda: listener.accept()[0], lambda: socket.create_connection(listener.getsockname()))
        self.ours, self.theirs = (Connection(sock, b"", None, None) for sock in cast("Any", ends))

    def start(self) -> None:
        pass

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        self.tell = callback
        return lambda: None

    def connect_members(self, *_: object) -> dict[int, Connection]:
        return {1: self.ours}

    def hold(self, holding: bool) -> None:
        pass

    def end_epoch(self) -> None:
        self.epoch = None
        self.tell(EpochEnded(EPOCH, "contact with b.1 is lost"))


def _soon() -> float:
    return time.monotonic() + 10


@pytest.mark.parametrize("is_early", [False, True], ids=["while it waits", "before it waits"])
def test_what_forms_is_given_up_when_its_epoch_ends(is_early: bool) -> None:
    node = Connected()
    backend = AutoDiscoveryBackend(node=cast("Any", node), group=DistributedConfig(shared_memory="off"))

    def end() -> None:
        if is_early:
            return
        assert node.theirs.hear(0, OfferConnections, _soon())  # now it waits for ours
        node.end_epoch()

    def form() -> None:
        with pytest.raises(
            NoConnectionError, match=r"Connection closed by rank 1|Connection broken|Connection to rank 1 broken"
        ):
            backend._form(EPOCH, _soon())

    if is_early:
        node.end_epoch()
    at_once(end, form)
    assert backend._forming is None
    node.theirs.close()
    backend.close()


@pytest.mark.parametrize("has_ended", [False, True], ids=["while it forms", "before"])
def test_the_group_of_an_epoch_that_has_ended_is_given_up_at_once(has_ended: bool) -> None:
    """And not after the timeout: the program may have no place in the next epoch."""
    node = Connected()
    backend = AutoDiscoveryBackend(node=cast("Any", node), group=DistributedConfig(shared_memory="off"))

    def end() -> None:
        if not has_ended:
            assert node.theirs.hear(0, OfferConnections, _soon())
            node.end_epoch()

    def form() -> None:
        begun = time.monotonic()
        with pytest.raises(EpochEndedError, match="epoch 1"):
            backend.establish_epoch(EPOCH, 600.0)
        assert time.monotonic() < begun + 10

    if has_ended:
        node.end_epoch()
    at_once(end, form)
    node.theirs.close()
    backend.close()
