"""A learner gets streams to all members at once; one that does not answer holds up nobody."""

from __future__ import annotations

import threading
from typing import Any, cast

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.core.state_sources import StateSource
from ringfort.errors import NoConnectionError
from ringfort.training.elastic.donor_search import DonorSearch

EPOCH = Epoch(3, "a", tuple(map(Member, "abc")), (), ("a#1",))
LIMIT = 20.0
"""Seconds for what takes none."""


class Links:
    """The donors of a learner."""

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        self.added: dict[str, object] = {}

    @property
    def donors(self) -> tuple[str, ...]:
        return tuple(self.added)

    def add(self, peer: str, connection: object) -> None:
        self.added[peer] = connection


class Node:
    """Opens streams: to frozen peers after a while, to those that are gone never."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.frozen: set[str] = set()
        self.thaw = threading.Event()
        self.asked: list[str] = []

    def open_stream(self, peer: str) -> Connection:
        self.asked.append(peer)
        if peer in self.gone:
            raise NoConnectionError(f"no control link with {peer}")
        if peer in self.frozen:
            assert self.thaw.wait(LIMIT)
        return cast("Connection", f"stream to {peer}")


def sources(peers: str) -> list[StateSource]:
    return [StateSource(peer, EPOCH) for peer in peers]


def test_the_first_stream_is_enough_and_a_slow_one_is_added_later() -> None:
    links, node = Links(), Node()
    node.frozen = {"a"}
    search = DonorSearch(cast("Any", links), node.open_stream)
    search.look(sources("ab"))
    assert search.has_found(LIMIT)
    assert "b" in links.added
    search.look(sources("ab"))  # it is being opened
    node.thaw.set()
    while "a" not in links.added:
        assert search.has_found(LIMIT)
    assert sorted(node.asked) == ["a", "b"]


def test_if_nobody_can_be_reached_that_is_known_at_once_and_why() -> None:
    links, node = Links(), Node()
    node.gone = {"a", "b"}
    search = DonorSearch(cast("Any", links), node.open_stream)
    search.look(sources("ab"))
    assert not search.has_found(LIMIT)
    assert set(links.lost) == {"a", "b"}
    search.look(sources("abc"))  # those are not tried again, one that came later is
    assert search.has_found(LIMIT)
    assert sorted(node.asked) == ["a", "b", "c"]


def test_the_wait_for_a_frozen_member_ends() -> None:
    links, node = Links(), Node()
    node.frozen = {"a"}
    search = DonorSearch(cast("Any", links), node.open_stream)
    search.look(sources("a"))
    assert not search.has_found(0.0)
    node.thaw.set()
