"""TCP: what the operating system refuses is said in words."""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfort.errors import TransportError
from ringfort.testing.groups import reserved_addresses
from ringfort.transport import tcp
from ringfort.transport.socket_streams import SocketPoller
from ringfort.transport.stream import Ready
from tests.helpers.background import Background


def free_port() -> Iterator[int]:
    with reserved_addresses(1) as (address,):
        yield int(address.rpartition(":")[2])


port = pytest.fixture(free_port)


def test_a_port_in_use_is_said_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(TransportError, match=f"127.0.0.1:{taken}: the port is in use; stop the other program"):
            tcp.listen("127.0.0.1", taken)


def test_an_address_of_another_machine_is_said_in_words() -> None:
    with pytest.raises(TransportError, match=r"192\.0\.2\.1:0: this machine does not have this address"):
        tcp.listen("192.0.2.1", 0)


class Forbidden(socket.socket):
    def bind(self, address: object, /) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_port_that_needs_root_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp.socket, "socket", Forbidden)
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:80: permission denied; choose a port above 1023"):
        tcp.listen("127.0.0.1", 80)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70, "..", "a b"])
def test_an_unknown_host_is_said_in_words(host: str) -> None:
    with pytest.raises(TransportError, match=f"Unknown host '{re.escape(host)}'") as caught:
        tcp.resolve(host, 1)
    assert caught.value.peer == host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_listener_is_found_by_every_kind_of_address(host: str) -> None:
    with tcp.listen(host, 0) as listener:
        address = (host, listener.getsockname()[1])
        with socket.create_connection(address, timeout=5) as sock, listener.accept()[0] as accepted:
            sock.sendall(b"hello")
            assert accepted.recv(5) == b"hello"


def test_a_listener_of_the_launcher_is_taken_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as original, tcp.adopt_listener(original.dup().detach()) as adopted:
        assert adopted.getsockname() == original.getsockname()
        assert not adopted.getblocking()


def test_a_descriptor_that_is_no_socket_is_said_in_words() -> None:
    with (
        Path("/dev/null").open() as file,
        pytest.raises(TransportError, match=f"descriptor {file.fileno()} is not a listening socket"),
    ):
        tcp.adopt_listener(file.fileno())


def test_data_sockets_do_not_delay_small_messages() -> None:
    with tcp.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as sock:
        tcp.tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert not sock.getblocking()


# --- sleeping on sockets ----------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    a.setblocking(False)
    with a, b:
        yield a, b


@pytest.fixture
def poller(pair: tuple[socket.socket, socket.socket]) -> Iterator[SocketPoller]:
    """Knows the first of `pair` as peer 5."""
    poller = SocketPoller({5: pair[0]})
    yield poller
    poller.close()


def test_a_poller_says_what_can_move(poller: SocketPoller, pair: tuple[socket.socket, socket.socket]) -> None:
    poller.watch(5, read=True, write=False)
    assert poller.wait(poller.now()) == []
    pair[1].send(b"x")
    assert poller.wait(poller.now() + 5) == [Ready(5, readable=True, writable=False)]
    poller.watch(5, read=True, write=True)
    assert poller.wait(poller.now() + 5) == [Ready(5, readable=True, writable=True)]
    poller.watch(5, read=False, write=False)
    assert poller.wait(poller.now()) == []
    poller.watch(5, read=True, write=False)
    poller.forget(5)
    poller.forget(5)
    assert poller.wait(poller.now()) == []


def test_the_end_of_a_stream_can_be_read(poller: SocketPoller, pair: tuple[socket.socket, socket.socket]) -> None:
    poller.watch(5, read=True, write=False)
    pair[1].close()
    assert poller.wait(poller.now() + 5) == [Ready(5, readable=True, writable=False)]


def test_a_poller_wakes_when_it_is_told_to_also_beforehand(poller: SocketPoller) -> None:
    for _ in range(100_000):
        poller.wake()  # more than its pipe holds
    start = time.monotonic()
    assert poller.wait(start + 20) == []
    waiting = Background(poller.wait, start + 20)
    poller.wake()
    assert waiting.result() == []
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("far", [1e7, 1e10, 1e300])
def test_a_deadline_may_be_further_than_any_clock_counts(
    poller: SocketPoller, pair: tuple[socket.socket, socket.socket], far: float
) -> None:
    poller.watch(5, read=True, write=False)
    pair[1].send(b"x")
    assert poller.wait(poller.now() + far) == [Ready(5, readable=True, writable=False)]


def test_waking_a_closed_poller_is_no_error(pair: tuple[socket.socket, socket.socket]) -> None:
    poller = SocketPoller({5: pair[0]})
    poller.close()
    poller.wake()


def test_a_peer_has_hung_up_even_if_what_it_said_is_unread() -> None:
    first, other = socket.socketpair()
    with first:
        other.send(b"bye")
        assert not tcp.has_hung_up(first)
        other.close()
        assert tcp.has_hung_up(first)
