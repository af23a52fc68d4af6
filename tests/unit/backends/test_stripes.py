"""How ranks come to have several connections with each other, over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ringfort import DistributedConfig, DistributedContext, SubBackend
from ringfort.backends import stripes as forming
from ringfort.backends.rendezvous import Terms
from ringfort.backends.stripes import AUTO_STRIPES, open_stripes, wanted
from ringfort.collectives import stripes
from ringfort.config import CollectiveConfig
from ringfort.errors import ConfigError, DistributedError, HandshakeError, ProtocolError
from ringfort.testing import run_ranks
from ringfort.testing.groups import passing_credentials, ring_group, tcp_group, without_encryption
from ringfort.testing.ranks import at_once, results
from ringfort.transport import tcp
from ringfort.transport.channel import Channel
from ringfort.transport.door import Door
from ringfort.transport.greeting import Control, Stripe
from ringfort.transport.machine import Machine

CONFIG = DistributedConfig(timeout=20, shared_memory="off", collective=CollectiveConfig(stripes=3))
GROUPS = {"tcp": tcp_group, "ring": ring_group, "plain": without_encryption(tcp_group)}


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_every_two_ranks_have_so_many_connections_and_all_carry_a_large_array(group: Any) -> None:
    def program(backend: Any) -> list[tuple[int, int]]:
        x = np.full(1_200_000, backend.rank + 1.0, np.float32)
        DistributedContext(backend).all_reduce(x)
        assert (x == 6).all()
        sub = SubBackend(backend, (0, 1, 2))
        assert (DistributedContext(sub).all_gather(x)[:, -1] == 6).all()
        engines = [stripe._engine for stripe in backend.stripes]
        assert backend.traffic().bytes_sent == sum(engine.traffic()[1] for engine in engines)
        return [(len(engine.links), engine.traffic()[1] > 1_000_000) for engine in engines]

    with group(3, CONFIG) as backends:
        assert results(run_ranks(backends, program)) == [[(2, True)] * 3] * 3


def test_ranks_that_share_memory_open_no_further_connections() -> None:
    here, elsewhere = Machine(b"1", shares=True), Machine(b"2", shares=True)
    for config in (CollectiveConfig(stripes=3), CollectiveConfig(stripes="auto")):
        assert wanted(config, {0: here, 1: here}) == 1
        assert wanted(config, {0: here, 1: Machine(b"1")}) > 1
    assert wanted(CollectiveConfig(stripes="auto"), {0: here, 1: elsewhere}) == AUTO_STRIPES
    assert wanted(CollectiveConfig(), {0: here, 1: elsewhere}) == 1


def test_auto_decides_the_same_at_every_rank_and_loses_nothing_while_it_tries() -> None:
    config = replace(CONFIG, encryption="off", collective=CollectiveConfig(stripes="auto"))

    def program(backend: Any) -> int | None:
        context = DistributedContext(backend)
        for _ in range(stripes.TRIALS):
            x = np.ones(stripes.TRIAL // 4, np.float32)
            context.all_reduce(x)
            assert (x == 2).all()
        return stripes.used(backend)

    with tcp_group(2, config) as backends:
        first, second = results(run_ranks(backends, program))
        assert first == second
        assert first in (1, AUTO_STRIPES), "which of them is the machine's business"


def test_ranks_that_want_other_numbers_say_so_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((1, 2))
    lock = threading.Lock()

    def in_turn(config: object, machines: object) -> int:
        with lock:
            return next(counts)

    monkeypatch.setattr("ringfort.backends.tcp.wanted", in_turn)
    with (
        pytest.raises(ConfigError, match=r"stripes=\d: rank \d has \d; set the same on all ranks"),
        tcp_group(2, CONFIG),
    ):
        pass


# --- two ends of one connection ---------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Any:
    """An open channel, seen from both sides, and the terms of both."""
    terms = Terms.begin(10, passing_credentials(), Machine())
    door = Door(tcp.listen("127.0.0.1", 0), terms.credentials)

    def accept() -> Channel:
        while True:
            arrivals, _ = door.wait(terms.deadline)
            if arrivals:
                return arrivals[0].channel

    def connect() -> Channel:
        return Channel.open(
            tcp.connect([door.address], terms.deadline), terms.credentials, Control(), "it", terms.deadline
        )

    both: list[Channel] = at_once(accept, connect)
    yield (*both, terms)
    door.close()
    for channel in both:
        channel.close()


def test_a_stranger_at_the_port_is_refused_and_keeps_nobody_out(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    low, high, terms = ends
    refused: list[str] = []
    knock: Callable[..., Channel] = forming._knock

    def with_a_stranger_before(rank: int, peer: int, first: Channel, number: int, said: Any, terms: Terms) -> Channel:
        for purpose in (Control(), Stripe(1, 1, b"guess" * 4), Stripe(7, 1, said.token), Stripe(1, 9, said.token)):
            sock = tcp.connect([(first.sock.getpeername()[0], said.port)], terms.deadline)
            channel = Channel.open(sock, terms.credentials, purpose, "it", terms.deadline)
            try:
                channel.hear("it", terms.deadline)
            except DistributedError as exc:
                refused.append(str(exc))
            channel.close()
        return knock(rank, peer, first, number, said, terms)

    monkeypatch.setattr(forming, "_knock", with_a_stranger_before)
    lower, higher = at_once(lambda: open_stripes(0, {1: low}, 2, terms), lambda: open_stripes(1, {0: high}, 2, terms))
    for channel in (lower[0][1], higher[0][0]):
        channel.close()
    assert len(refused) == 4
    assert all("further connections" in words for words in refused)


def test_ranks_that_have_met_different_machines_in_a_ranks_place_say_so(ends: Any) -> None:
    """Here rank 1 has met a machine that rank 0 says it is not."""
    low, high, terms = ends
    other = replace(terms, credentials=replace(terms.credentials, identity=passing_credentials().identity))
    outcomes = run_ranks(
        [(0, {1: low}, other), (1, {0: high}, terms)],
        lambda side: open_stripes(side[0], side[1], 1, side[2]),
        timeout=20,
    )
    assert [type(outcome) for outcome in outcomes] == [HandshakeError, HandshakeError]
    assert "rank 1 and this rank are connected with different machines" in str(outcomes[0])


def test_another_node_of_the_cluster_cannot_answer_in_a_ranks_place(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    low, high, terms = ends
    monkeypatch.setattr(forming, "_digest", lambda rank, channels, terms: b"")  # else it is noticed before
    imposter = replace(terms, credentials=replace(terms.credentials, identity=passing_credentials().identity))
    outcomes = run_ranks(
        [(0, {1: low}, imposter), (1, {0: high}, terms)],
        lambda side: open_stripes(side[0], side[1], 2, side[2]),
        timeout=20,
    )
    for made in outcomes:
        for channels in made if isinstance(made, list) else ():
            for channel in channels.values():
                channel.close()
    assert any(isinstance(outcome, ProtocolError) and "somebody else" in str(outcome) for outcome in outcomes)


def test_what_was_opened_is_closed_when_a_peer_goes_away(ends: Any) -> None:
    low, high, terms = ends
    high.sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(DistributedError):
        open_stripes(0, {1: low}, 4, terms)
