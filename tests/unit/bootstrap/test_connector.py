"""The connector: it keeps trying until the deadline, and returns only who has proved to be the right one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.connector import connect
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.terms import Terms
from ringfort.errors import HandshakeError, NoConnectionError, RendezvousTimeoutError
from ringfort.transport import tcp
from ringfort.transport.hello import Control
from ringfort.transport.machine import Machine
from tests.helpers.background import Background
from tests.helpers.handshakes import member

HOST = member()


def terms(timeout: float = 20) -> Terms:
    return Terms.begin(timeout, member(), Machine())


@pytest.fixture
def port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(HOST, tcp.listen("127.0.0.1", 0))
    yield listener
    listener.close()


def accept(listener: Listener) -> Connection:
    deadline = time.monotonic() + 20
    while not (accepted := listener.wait(deadline)):
        assert time.monotonic() < deadline, "nobody connects"
    return accepted[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_listener_is_found_by_every_kind_of_address(host: str) -> None:
    listener = Listener(HOST, tcp.listen(host, 0))
    connecting = Background(connect, 0, [(host, listener.address[1])], Control(), terms())
    accepted, connection = accept(listener), connecting.result()
    assert accepted.purpose == Control()
    assert connection.identity == HOST.identity.public_key
    for each in (accepted, connection, listener):
        each.close()


def test_connecting_keeps_trying_until_somebody_listens(port: int) -> None:
    connecting = Background(connect, 0, [("127.0.0.1", port)], Control(), terms())
    listener = Listener(HOST, tcp.listen("127.0.0.1", port))
    accepted, connection = accept(listener), connecting.result()
    assert connection.sock.getpeername() == ("127.0.0.1", port)
    for each in (accepted, connection, listener):
        each.close()


def test_connecting_is_tried_again_when_a_listener_drops_the_connection(listener: Listener) -> None:
    """As a flooded one may do to a member."""
    with tcp.listen("127.0.0.1", 0) as flooded:
        flooded.setblocking(True)
        addresses = [flooded.getsockname(), listener.address]
        connecting = Background(connect, 0, addresses, Control(), terms())
        flooded.accept()[0].close()
        accepted, connection = accept(listener), connecting.result()
        accepted.close()
        connection.close()


def test_connecting_gives_up_at_the_deadline_and_says_what_was_tried(port: int) -> None:
    start = time.monotonic()
    with pytest.raises(RendezvousTimeoutError, match="looking for rank 3") as caught:
        connect(3, [("127.0.0.1", port), ("no-such-host.invalid", 5)], Control(), terms(0.2))
    assert time.monotonic() - start >= 0.2
    assert f"127.0.0.1:{port}: Connection refused" in str(caught.value)
    assert "no-such-host.invalid:5: Unknown host 'no-such-host.invalid'" in str(caught.value)
    assert caught.value.missing == (3,)


def test_the_first_address_that_answers_is_taken(port: int, listener: Listener) -> None:
    connecting = Background(connect, 0, [("127.0.0.1", port), listener.address], Control(), terms())
    accepted, connection = accept(listener), connecting.result()
    assert connection.sock.getpeername() == listener.address
    accepted.close()
    connection.close()


def test_who_proves_another_identity_is_not_taken(listener: Listener) -> None:
    expected = member().identity.public_key
    connecting = Background(connect, 2, [listener.address], Control(), terms(), identity=expected)
    accept(listener).close()
    with pytest.raises(HandshakeError, match="Another machine answers at the address of rank 2"):
        connecting.result()


def test_the_pauses_between_attempts_grow(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    now = time.monotonic()

    class Clock:
        monotonic = staticmethod(lambda: now + sum(pauses))
        sleep = staticmethod(pauses.append)

    for module in ("connector", "terms"):
        monkeypatch.setattr(f"ringfort.bootstrap.{module}.time", Clock)
    with pytest.raises(RendezvousTimeoutError):
        connect(0, [("127.0.0.1", port)], Control(), terms(10))
    assert sum(pauses) == pytest.approx(10)
    assert pauses[0] <= 0.02
    assert pauses[:-1] == sorted(pauses[:-1])
    assert max(pauses) <= 0.5
    assert len(pauses) < 60


def test_no_further_connection_is_tried_with_a_peer_whose_first_has_ended(port: int) -> None:
    first, other = socket.socketpair()
    with first:
        other.close()
        with pytest.raises(NoConnectionError, match=tcp.PEER_ENDED):
            connect(0, [("127.0.0.1", port)], Control(), terms(3600), beside=first)
