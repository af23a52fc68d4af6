"""How ranks come to have several connections with each other, over real sockets."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ringfort import DistributedConfig, DistributedContext, SubBackend
from ringfort.bootstrap import connector, more_connections
from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.more_connections import open_connections, wanted
from ringfort.bootstrap.terms import Terms
from ringfort.config import CollectiveConfig
from ringfort.errors import ConfigError, DistributedError, HandshakeError, NoConnectionError
from ringfort.testing import run_ranks
from ringfort.testing.groups import passing_credentials, ring_group, tcp_group, with_settings
from ringfort.testing.ranks import at_once, results
from ringfort.transport import tcp
from ringfort.transport.hello import Control, ExtraConnection, Hello, OfferConnections
from ringfort.transport.machine import Machine

CONFIG = DistributedConfig(timeout=20, shared_memory="off", collective=CollectiveConfig(connections=3))
GROUPS = {"tcp": tcp_group, "ring": ring_group, "plain": with_settings(tcp_group, encryption="off")}


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_every_two_ranks_have_so_many_connections_and_all_carry_a_large_array(group: Any) -> None:
    def program(backend: Any) -> list[tuple[int, int]]:
        x = np.full(1_200_000, backend.rank + 1.0, np.float32)
        DistributedContext(backend).all_reduce(x)
        assert (x == 6).all()
        sub = SubBackend(backend, (0, 1, 2))
        assert (DistributedContext(sub).all_gather(x)[:, -1] == 6).all()
        engines = [connection.engine for connection in backend.group.connections]
        sent = [sum(link[1] for link in engine.traffic()) for engine in engines]
        assert backend.traffic().bytes_sent == sum(sent)
        return [(len(engine.links), nbytes > 1_000_000) for engine, nbytes in zip(engines, sent, strict=True)]

    with group(3, CONFIG) as backends:
        assert results(run_ranks(backends, program)) == [[(2, True)] * 3] * 3


def test_ranks_that_share_memory_open_no_further_connections() -> None:
    here, elsewhere = Machine(b"1", shares=True), Machine(b"2", shares=True)
    for config, count in ((CollectiveConfig(connections=3), 3), (CollectiveConfig(), 0)):
        assert wanted(config, {0: here, 1: here}) == 1
        assert wanted(config, {0: here, 1: Machine(b"1")}) == count
        assert wanted(config, {0: here, 1: elsewhere}) == count


@pytest.mark.parametrize("wanted", [(1, 2), (0, 1)], ids=["two numbers", "auto and a number"])
def test_ranks_that_want_other_numbers_say_so_to_each_other(
    wanted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter(wanted)
    lock = threading.Lock()

    def in_turn(config: object, machines: object) -> int:
        with lock:
            return next(counts)

    monkeypatch.setattr("ringfort.bootstrap.links.wanted", in_turn)
    with (
        pytest.raises(ConfigError, match=r"connections=('auto'|\d): rank \d has (auto|\d); set the same on all ranks"),
        tcp_group(2, CONFIG),
    ):
        pass


# --- two ends of one connection ---------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Any:
    """An open connection, seen from both sides, and the terms of both."""
    terms = Terms.begin(10, passing_credentials(), Machine())
    listener = Listener(terms.credentials, tcp.listen("127.0.0.1", 0))

    def accept() -> Connection:
        while True:
            accepted = listener.wait(terms.deadline)
            if accepted:
                return accepted[0]

    def connect() -> Connection:
        return connector.connect(0, [listener.address], Control(), terms)

    both: list[Connection] = at_once(accept, connect)
    yield (*both, terms)
    listener.close()
    for connection in both:
        connection.close()


def test_another_member_at_the_port_is_refused_and_keeps_nobody_out(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    low, high, terms = ends
    refused: list[str] = []

    def with_others_before(rank: int, addresses: Any, hello: Any, terms: Terms, **options: Any) -> Connection:
        for purpose in (
            Control(),
            ExtraConnection(1, 1, b"guess" * 4),
            ExtraConnection(7, 1, hello.token),
            ExtraConnection(1, 9, hello.token),
        ):
            connection = connector.connect(rank, addresses, purpose, terms)
            try:
                connection.hear(0, Hello, terms.deadline)
            except DistributedError as exc:
                refused.append(str(exc))
            connection.close()
        return connector.connect(rank, addresses, hello, terms, **options)

    monkeypatch.setattr(more_connections, "connect", with_others_before)
    lower, higher = at_once(
        lambda: open_connections(0, {1: low}, 2, terms), lambda: open_connections(1, {0: high}, 2, terms)
    )
    for connection in (lower[0][1], higher[0][0]):
        connection.close()
    assert len(refused) == 4
    assert all("further connections" in words for words in refused)


def test_ranks_that_have_met_different_machines_in_a_ranks_place_say_so(ends: Any) -> None:
    """Here rank 1 has met a machine that rank 0 says it is not."""
    low, high, terms = ends
    other = replace(terms, credentials=replace(terms.credentials, identity=passing_credentials().identity))
    outcomes = run_ranks(
        [(0, {1: low}, other), (1, {0: high}, terms)],
        lambda side: open_connections(side[0], side[1], 1, side[2]),
        timeout=20,
    )
    assert [type(outcome) for outcome in outcomes] == [HandshakeError, HandshakeError]
    assert "Rank 1 and this rank are connected with different machines" in str(outcomes[0])


def test_another_node_of_the_cluster_cannot_answer_in_a_ranks_place(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    low, high, terms = ends
    monkeypatch.setattr(more_connections, "_digest", lambda rank, connections, terms: b"")  # else it is noticed before
    imposter = replace(terms, credentials=replace(terms.credentials, identity=passing_credentials().identity))
    outcomes = run_ranks(
        [(0, {1: low}, imposter), (1, {0: high}, terms)],
        lambda side: open_connections(side[0], side[1], 2, side[2]),
        timeout=20,
    )
    for made in outcomes:
        for connections in made if isinstance(made, list) else ():
            for connection in connections.values():
                connection.close()
    assert any(
        isinstance(outcome, HandshakeError) and "Another machine answers" in str(outcome) for outcome in outcomes
    )


def test_what_was_opened_is_closed_when_a_peer_goes_away(ends: Any) -> None:
    low, high, terms = ends
    high.sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(DistributedError):
        open_connections(0, {1: low}, 4, terms)


def test_a_peer_that_goes_before_it_has_come_again_is_not_waited_for(ends: Any) -> None:
    low, high, terms = ends
    digest = more_connections._digest(0, {1: low}, terms)
    high.say(OfferConnections(2, 0, b"", digest), terms.deadline)
    high.sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(NoConnectionError, match="Rank 1 closed its connection before all connections were open"):
        open_connections(0, {1: low}, 2, terms)


def test_a_peer_that_goes_while_it_is_connected_to_is_not_waited_for(ends: Any) -> None:
    """Its port takes the connection, and says nothing."""
    low, high, terms = ends
    digest = more_connections._digest(1, {0: high}, terms)

    def go_when_connected() -> None:
        with tcp.listen("127.0.0.1", 0) as listener:
            listener.settimeout(10)
            low.say(OfferConnections(2, listener.getsockname()[1], b"", digest), terms.deadline)
            with listener.accept()[0]:
                low.sock.shutdown(socket.SHUT_RDWR)
                is_over.wait(10)

    is_over = threading.Event()

    def connect() -> None:
        try:
            with pytest.raises(NoConnectionError, match="No answer from rank 0: its first connection has end"):
                open_connections(1, {0: high}, 2, terms)
        finally:
            is_over.set()

    at_once(go_when_connected, connect)
