"""A learner gets streams to all members at once; one that does not answer holds up nobody."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.core.state_sources import StateSource
from ringfort.errors import NoConnectionError
from ringfort.training.elastic.donor_search import DonorSearch
from tests.helpers.agents import until

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
    """Opens streams: to frozen peers after a while, to those that are gone never. News come when a test says so."""

    def __init__(self, gone: str = "", frozen: str = "") -> None:
        self.gone, self.frozen = gone, frozen
        self.thaw = threading.Event()
        self.asked: list[str] = []
        self.peers = ""
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.news = 0

    def tell(self, peers: str) -> None:
        self.peers = peers
        self._news.put(None)

    def wait_for_news(self, seen: int, seconds: float) -> None:
        self._news.get(timeout=LIMIT)

    def sources(self) -> list[StateSource]:
        return sources(self.peers)

    def open_stream(self, peer: str) -> Connection:
        self.asked.append(peer)
        if peer in self.gone:
            raise NoConnectionError(f"no control link with {peer}")
        if peer in self.frozen:
            assert self.thaw.wait(LIMIT)
        return cast("Connection", f"stream to {peer}")


def sources(peers: str) -> list[StateSource]:
    return [StateSource(peer, EPOCH) for peer in peers]


@contextmanager
def search(links: Links, node: Node, peers: str) -> Iterator[DonorSearch]:
    made = DonorSearch(cast("Any", links), node)
    made.start(sources(peers))
    try:
        yield made
    finally:
        node.thaw.set()
        made.close()
        node.tell(node.peers)


def test_the_first_stream_is_enough_and_a_slow_one_is_added_later() -> None:
    links, node = Links(), Node(frozen="a")
    with search(links, node, "ab") as found:
        assert found.has_found(LIMIT)
        assert "b" in links.added
        node.tell("ab")  # it is being opened
        node.thaw.set()
        until(lambda: "a" in links.added, "the slow one is added")
        assert sorted(node.asked) == ["a", "b"]


def test_a_member_that_comes_while_the_state_is_copied_becomes_a_donor() -> None:
    links, node = Links(), Node()
    with search(links, node, "a") as found:
        assert found.has_found(LIMIT)
        node.tell("abc")
        until(lambda: set(links.added) == {"a", "b", "c"}, "all are donors")


def test_if_nobody_can_be_reached_that_is_known_at_once_and_why() -> None:
    links, node = Links(), Node(gone="ab")
    with search(links, node, "ab") as found:
        assert not found.has_found(LIMIT)
        assert set(links.lost) == {"a", "b"}
        node.tell("abc")  # those are not tried again, one that came later is
        until(lambda: "c" in links.added, "the later one is a donor")
        assert sorted(node.asked) == ["a", "b", "c"]


def test_the_wait_for_a_frozen_member_ends() -> None:
    with search(Links(), Node(frozen="a"), "a") as found:
        assert not found.has_found(0.0)
