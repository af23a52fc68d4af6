"""The door: all who come are heard at the same time, and strays are dropped without keeping anybody waiting."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import pytest

from ringfort.errors import NoConnectionError, ProtocolError, RankTakenError, TransportError
from ringfort.transport import door as door_module
from ringfort.transport.door import Arrival, Door, hear, say
from ringfort.transport.greeting import Join, Ready, Refused, encode
from ringfort.transport.tcp import listen

JOIN = Join(1, 2, "here", 5)


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door(listen("127.0.0.1", 0))
    yield door
    door.close()


@pytest.fixture
def clients() -> Iterator[list[socket.socket]]:
    """Closed in the end."""
    clients: list[socket.socket] = []
    yield clients
    for client in clients:
        client.close()


def soon() -> float:
    return time.monotonic() + 5


def call_at(door: Door, clients: list[socket.socket]) -> socket.socket:
    client = socket.create_connection(door.address)
    clients.append(client)
    return client


def arrivals(door: Door, wanted: int = 1) -> list[Arrival]:
    """The first `wanted` who say who they are."""
    found: list[Arrival] = []
    deadline = soon()
    while len(found) < wanted:
        found += door.wait(deadline)[0]
        assert time.monotonic() < deadline, "nobody comes"
    return found


def turned_away(door: Door, number: int = 1) -> str:
    """What is said about them, once so many were turned away."""
    deadline = soon()
    while len(door.turned_away) < number:
        door.wait(deadline)
        assert time.monotonic() < deadline, "nobody is turned away"
    return "; ".join(door.turned_away)


def test_somebody_who_says_who_they_are_arrives(door: Door, clients: list[socket.socket]) -> None:
    client = call_at(door, clients)
    client.sendall(encode(JOIN) + b"more")
    [arrival] = arrivals(door)
    assert arrival.said == JOIN
    assert arrival.address == "{}:{}".format(*client.getsockname())
    assert arrival.sock.recv(100) == b"more"  # not a byte more was read than the greeting
    arrival.sock.close()


def test_greetings_in_pieces_from_many_at_once_are_all_heard(door: Door, clients: list[socket.socket]) -> None:
    for rank in range(10):
        call_at(door, clients).sendall(encode(Join(rank, 10, "", 0))[:9])
    assert door.wait(time.monotonic())[0] == []
    for rank, client in enumerate(clients):
        client.sendall(encode(Join(rank, 10, "", 0))[9:])
    found = arrivals(door, 10)
    assert {arrival.said for arrival in found} == {Join(rank, 10, "", 0) for rank in range(10)}
    for arrival in found:
        arrival.sock.close()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "not Ringfort"),
        (b"\x16\x03\x01\x02\x00\x01", "not Ringfort"),
        (b"RGFT\x01\x00\x04\x00\xc1\xc1\xc1\xc1", "cannot be read"),
        (b"RGFT\x01\x00\xff\xff", "65535 bytes"),
    ],
)
def test_a_stray_is_dropped_noted_and_logged(
    door: Door, clients: list[socket.socket], caplog: pytest.LogCaptureFixture, words: bytes, complaint: str
) -> None:
    client = call_at(door, clients)
    with caplog.at_level(logging.WARNING):
        client.sendall(words)
        noted = turned_away(door)
    assert complaint in noted
    assert "{}:{}".format(*client.getsockname()) in noted
    assert complaint in caplog.text


def test_a_port_scanner_is_dropped(door: Door, clients: list[socket.socket]) -> None:
    call_at(door, clients).close()
    assert "closed before it said who it is" in turned_away(door)


def test_another_version_is_told_so(door: Door, clients: list[socket.socket]) -> None:
    client = call_at(door, clients)
    client.sendall(encode(JOIN, version=99))
    assert "version 99" in turned_away(door)
    with pytest.raises(TransportError, match="version 99"):
        hear(client, "rank 0", soon())


def test_a_silent_client_is_dropped_in_the_end(
    door: Door, clients: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "GREETING_TIMEOUT", 0.05)
    client = call_at(door, clients)
    assert "said nothing useful for 0.05 s" in turned_away(door)
    assert client.recv(1) == b""


def test_the_oldest_stranger_makes_room_for_a_new_one(
    door: Door, clients: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MAX_WAITING", 3)
    for _ in range(4):
        call_at(door, clients)
    assert "too many strangers" in turned_away(door)
    assert clients[0].recv(1) == b""
    clients[3].sendall(encode(JOIN))
    arrivals(door)[0].sock.close()


def test_a_stranger_that_speaks_while_it_makes_room_is_no_problem(
    door: Door, clients: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MAX_WAITING", 1)
    first = call_at(door, clients)
    door.wait(time.monotonic() + 0.2)
    second = call_at(door, clients)  # both stir before the door looks again
    first.sendall(b"hello?")
    assert "too many strangers" in turned_away(door)
    second.sendall(encode(JOIN))
    arrivals(door)[0].sock.close()


def test_who_is_refused_hears_why(door: Door, clients: list[socket.socket]) -> None:
    client = call_at(door, clients)
    client.sendall(encode(JOIN))
    door.refuse(arrivals(door)[0], "rank_taken", "rank 1 is here already")
    with pytest.raises(RankTakenError, match="rank 1 is here already"):
        hear(client, "rank 0", soon())
    assert "rank 1 is here already" in door.turned_away[0]


def test_only_the_last_few_who_were_turned_away_are_remembered(door: Door, clients: list[socket.socket]) -> None:
    for _ in range(20):
        call_at(door, clients).close()
    deadline = soon()
    while len(door.turned_away) < 8 and time.monotonic() < deadline:
        door.wait(deadline)
    door.wait(time.monotonic())
    assert len(door.turned_away) == 8


def test_a_watched_socket_that_stirs_is_reported(door: Door, clients: list[socket.socket]) -> None:
    client = call_at(door, clients)
    client.sendall(encode(JOIN))
    [arrival] = arrivals(door)
    door.watch(arrival.sock)
    assert door.wait(time.monotonic()) == ([], [])
    client.close()
    assert door.wait(soon()) == ([], [arrival.sock])
    door.forget(arrival.sock)
    arrival.sock.close()


def test_a_door_that_closes_closes_on_those_outside(clients: list[socket.socket]) -> None:
    door = Door(listen("127.0.0.1", 0))
    client = call_at(door, clients)
    door.wait(soon())
    door.close()
    assert client.recv(1) == b""


# --- say and hear -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(clients: list[socket.socket]) -> tuple[socket.socket, socket.socket]:
    a, b = socket.socketpair()
    clients += [a, b]
    return a, b


def test_what_is_said_is_heard_and_nothing_behind_it(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = pair
    say(a, Ready(), soon())
    a.sendall(b"data")
    assert hear(b, "rank 1", soon()) == Ready()
    assert b.recv(10) == b"data"


def test_a_peer_that_does_not_answer_is_named(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(NoConnectionError, match="rank 7 accepted the connection but did not answer"):
        hear(pair[0], "rank 7", time.monotonic() + 0.05)


def test_a_peer_that_ends_instead_of_answering_is_named(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with pytest.raises(NoConnectionError, match="rank 7 closed the connection"):
        hear(pair[0], "rank 7", soon())
    with pytest.raises(TransportError, match="broke"):
        say(pair[0], Ready(), soon())


def test_a_peer_that_answers_something_else_is_a_protocol_error(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].sendall(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(ProtocolError, match="not Ringfort"):
        hear(pair[0], "rank 7", soon())


def test_a_refusal_is_raised_as_what_it_means(pair: tuple[socket.socket, socket.socket]) -> None:
    say(pair[1], Refused("rank_taken", "taken"), soon())
    with pytest.raises(RankTakenError, match="refused by rank 7: taken"):
        hear(pair[0], "rank 7", soon())


@pytest.mark.parametrize("far", [1e10, 1e300])
def test_a_deadline_may_be_further_than_any_clock_counts(pair: tuple[socket.socket, socket.socket], far: float) -> None:
    say(pair[0], Ready(), far)
    assert hear(pair[1], "rank 1", far) == Ready()
