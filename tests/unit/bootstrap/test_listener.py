"""The listener: all clients are served at the same time, and bad ones are dropped without delaying others."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from ringfort.bootstrap import listener as listener_module
from ringfort.bootstrap.admission import MAX_WAITING
from ringfort.bootstrap.connection import Connection, run
from ringfort.bootstrap.listener import Listener
from ringfort.errors import (
    EncryptionMismatchError,
    HandshakeError,
    NamespaceMismatchError,
    NoConnectionError,
    RankTakenError,
    TamperedError,
    VersionMismatchError,
)
from ringfort.identity.credentials import Credentials
from ringfort.identity.namespace import NetworkNamespace
from ringfort.transport.frames import PROTOCOL_VERSION
from ringfort.transport.handshake import MAGIC, NOISE, PLAIN, PREAMBLE, Handshake
from ringfort.transport.hello import MAX_PURPOSE, Hello, Join, Ready, Refused
from ringfort.transport.records import LENGTH
from ringfort.transport.tcp import listen
from tests.helpers.background import Background
from tests.helpers.handshakes import CLUSTER, handshake_of, impostor, member

JOIN = Join(1, 2, "here", 5)
HOST = member()


class Scene:
    """A listener and all its clients, in one thread: no call blocks."""

    def __init__(self, credentials: Credentials | None = HOST, **limits: Any) -> None:
        self.listener = Listener(credentials, listen("127.0.0.1", 0))
        vars(self.listener).update(limits)
        self._sockets: list[socket.socket] = []

    def call(self, words: bytes = b"") -> socket.socket:
        """A client that connects and sends `words`."""
        sock = socket.create_connection(self.listener.address, timeout=5)
        self.keep(sock)
        sock.sendall(words)
        return sock

    def keep(self, sock: socket.socket) -> None:
        """Close `sock` in the end."""
        self._sockets.append(sock)

    def member(
        self, purpose: Hello = JOIN, credentials: Credentials | None = None, *, encryption: str = "on"
    ) -> Background[Connection]:
        """A member that connects properly, in a thread."""
        sock = self.call()
        credentials = (credentials or member()) if encryption == "on" else None
        return Background(run, Connection.initiate(sock, credentials, purpose, "rank 0"), soon())

    def accepted(self, wanted: int = 1) -> list[Connection]:
        """The first `wanted` connections."""
        found: list[Connection] = []
        deadline = soon()
        while len(found) < wanted:
            found += self.listener.wait(deadline)
            assert time.monotonic() < deadline, f"nobody connects; refused: {self.listener.refusals}"
        self._sockets += [connection.sock for connection in found]
        return found

    def refused(self, number: int = 1) -> str:
        """What is noted, once so many clients were refused."""
        deadline = soon()
        while len(self.listener.refusals) < number:
            assert self.listener.wait(deadline) == []
            assert time.monotonic() < deadline, "nobody is refused"
        return "; ".join(self.listener.refusals)

    def close(self) -> None:
        self.listener.close()
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def soon() -> float:
    return time.monotonic() + 5


def address_of(sock: socket.socket) -> str:
    return "{}:{}".format(*sock.getsockname())


def ends(sock: socket.socket) -> bool:
    """Whether the other side has closed, perhaps with unread words of ours."""
    try:
        while sock.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


# --- members ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_somebody_who_proves_membership_arrives_with_what_they_came_for(encryption: str) -> None:
    scene = Scene(HOST if encryption == "on" else None)
    client = member()
    connecting = scene.member(credentials=client, encryption=encryption)
    [accepted] = scene.accepted()
    connection = connecting.result()
    assert accepted.purpose == JOIN
    assert accepted.address == address_of(connection.sock)
    assert accepted.identity == (client.identity.public_key if encryption == "on" else b"")
    assert connection.identity == (HOST.identity.public_key if encryption == "on" else b"")
    accepted.say(Ready(), soon())
    connection.sock.settimeout(5)
    assert connection.hear(0, Hello, soon()) == Ready()
    scene.close()


def test_many_at_once_are_all_heard(scene: Scene) -> None:
    members = [scene.member(Join(rank, 10, "", 0)) for rank in range(10)]
    found = scene.accepted(10)
    assert {accepted.purpose for accepted in found} == {Join(rank, 10, "", 0) for rank in range(10)}
    for connecting in members:
        connecting.result()


def test_an_handshake_in_single_bytes_is_heard_and_not_a_byte_more_is_read(scene: Scene) -> None:
    sock = scene.call()
    handshake = Handshake(member(), JOIN)
    found: list[Connection] = []
    deadline = soon()
    sock.setblocking(False)
    while not handshake.is_open:
        for place in range(len(handshake.outgoing)):
            sock.send(handshake.outgoing[place : place + 1])
            found += scene.listener.wait(time.monotonic() + 0.01)
        handshake.outgoing.clear()
        try:
            handshake.feed(sock.recv(handshake.wants))
        except BlockingIOError:
            found += scene.listener.wait(time.monotonic() + 0.01)
        assert time.monotonic() < deadline
    [accepted] = found
    assert accepted.purpose == JOIN
    sock.send(b"more")
    accepted.sock.settimeout(5)
    assert accepted.sock.recv(100) == b"more"
    accepted.close()


# --- bad clients ------------------------------------------------------------------------------------------------------


def preamble(version: int = PROTOCOL_VERSION, mode: int = NOISE, network_id: bytes = CLUSTER.network_id) -> bytes:
    return PREAMBLE.pack(MAGIC, version, mode, 0, network_id)


def wrong_third_message() -> bytes:
    """All that a client without the secret can prepare beforehand; its third message opens under no key."""
    return bytes(Handshake(impostor(), JOIN).outgoing) + LENGTH.pack(300) + bytes(300)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "not Ringfort"),
        (b"GET /\r\n", "not Ringfort"),
        (b"\x16\x03\x01\x02\x00\x01", "not Ringfort"),
        (preamble() + bytes(48), "does not know the secret of this cluster"),
        (wrong_third_message(), "does not know the secret of this cluster"),
        (bytes(Handshake(member(), JOIN).outgoing) + b"\xff\xff\xff\xff", "Invalid message: 4294967295 bytes"),
        (preamble(version=99), f"version 99, this side {PROTOCOL_VERSION}"),
        (preamble(mode=PLAIN, network_id=bytes(16)), "has encryption off, this side has it on"),
        (preamble(network_id=bytes(16)), "belongs to another cluster, this side to 'lab'"),
    ],
    ids=["http", "short http", "tls", "no key", "no secret", "too long", "version", "mode", "cluster"],
)
def test_a_bad_client_is_dropped_noted_and_logged(
    scene: Scene, caplog: pytest.LogCaptureFixture, words: bytes, complaint: str
) -> None:
    with caplog.at_level(logging.WARNING):
        sock = scene.call(words)
        noted = scene.refused()
    assert complaint in noted
    assert address_of(sock) in noted
    assert complaint in caplog.text
    assert ends(sock)


def test_a_plain_listener_drops_what_is_no_hello_and_what_is_too_long() -> None:
    scene = Scene(None)
    plain = preamble(mode=PLAIN, network_id=bytes(16))
    scene.call(plain + LENGTH.pack(4) + b"\xc1\xc1\xc1\xc1")
    assert "Malformed hello" in scene.refused()
    scene.call(plain + LENGTH.pack(MAX_PURPOSE + 1))
    assert str(MAX_PURPOSE + 1) in scene.refused(2)
    scene.close()


def test_a_port_scanner_is_dropped(scene: Scene) -> None:
    scene.call().close()
    assert "Connection closed by the other side in the handshake" in scene.refused()


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_a_member_of_another_cluster_is_told_why(scene: Scene, encryption: str) -> None:
    connecting = scene.member(credentials=member(NetworkNamespace.generate()), encryption=encryption)
    scene.refused()
    with pytest.raises(NamespaceMismatchError if encryption == "on" else EncryptionMismatchError, match="rank 0: "):
        connecting.result()


def test_another_version_is_told_why(scene: Scene) -> None:
    handshake = handshake_of(7, member(), JOIN)
    sock = scene.call(bytes(handshake.outgoing))
    scene.refused()
    with pytest.raises(VersionMismatchError, match=f"version {PROTOCOL_VERSION}, this side 7"):
        handshake.feed(sock.recv(handshake.wants))


def test_who_does_not_know_the_secret_is_dropped_without_a_name(scene: Scene) -> None:
    connecting = scene.member(credentials=impostor())
    assert "does not know the secret of this cluster" in scene.refused()
    with pytest.raises(NoConnectionError):
        connecting.result()


def test_a_silent_client_is_dropped_in_the_end() -> None:
    scene = Scene(handshake_timeout=0.05)
    sock = scene.call()
    assert "did not finish its handshake within 0.05 s" in scene.refused()
    assert sock.recv(1) == b""
    scene.close()


def test_a_client_that_drips_is_dropped_as_soon_as_a_silent_one() -> None:
    scene = Scene(handshake_timeout=0.2)
    sock = scene.call()
    words = iter(bytes(Handshake(member(), JOIN).outgoing))
    start = time.monotonic()
    while not scene.listener.refusals:
        sock.sendall(bytes([next(words)]))  # always something, never enough
        for _ in range(2):  # takes the byte, and then waits for another
            scene.listener.wait(time.monotonic() + 0.01)
    assert "did not finish its handshake within 0.2 s" in scene.listener.refusals[0]
    assert 0.2 <= time.monotonic() - start < 2
    assert ends(sock)
    scene.close()


def test_who_has_no_room_for_what_it_is_told_is_dropped(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    send = socket.socket.send
    monkeypatch.setattr(socket.socket, "send", lambda sock, data: send(sock, data[:1]))
    scene.call(bytes(Handshake(member(), JOIN).outgoing))
    assert "The other side does not read its handshake" in scene.refused()


def test_the_oldest_client_makes_room_for_a_new_one() -> None:
    scene = Scene(max_waiting=3)
    clients = [scene.call() for _ in range(3)]
    connecting = scene.member()
    scene.accepted()
    connecting.result()
    assert "too many unauthenticated connections" in scene.refused()
    assert clients[0].recv(1) == b""
    scene.close()


@pytest.mark.parametrize("kind", ["silent, the same address", "half a handshake, another address"])
def test_a_member_whose_answer_takes_long_keeps_its_place_in_a_flood(scene: Scene, kind: str) -> None:
    """Between its first message and its third, four times as many come as there are places."""
    words = b"" if "silent" in kind else bytes(Handshake(impostor(), JOIN).outgoing)
    source = ("127.0.0.1" if "the same" in kind else "127.0.0.2", 0)

    def flood() -> None:
        for _ in range(2 * MAX_WAITING):
            sock = socket.create_connection(scene.listener.address, timeout=5, source_address=source)
            scene.keep(sock)
            sock.sendall(words)
            assert scene.listener.wait(time.monotonic()) == []

    flood()
    handshake = Handshake(member(), JOIN)
    sock = scene.call(bytes(handshake.outgoing))
    handshake.outgoing.clear()
    flood()
    while not handshake.outgoing:
        handshake.feed(sock.recv(handshake.wants))
    flood()
    sock.sendall(handshake.outgoing)
    [accepted] = scene.accepted()
    assert accepted.purpose == JOIN


class Full(socket.socket):
    """A listening socket whose process has no descriptor left. Counts how often it was asked."""

    asked = 0
    is_full = True

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        if self.is_full:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_listener_without_descriptors_pauses_warns_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    slept: list[float] = []
    monkeypatch.setattr(listener_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    full = Full(fileno=listen("127.0.0.1", 0).detach())
    listener = Listener(HOST, full)
    select = listener._selector.select

    def sleep(seconds: float) -> object:
        found = select(0)
        if not found:  # nothing to do until then
            slept.append(seconds)
            now[0] += seconds
        return found

    monkeypatch.setattr(listener._selector, "select", sleep)
    with socket.create_connection(listener.address, timeout=5) as caller, caplog.at_level(logging.WARNING):
        while now[0] < 1002:
            assert listener.wait(1002) == []
        assert full.asked == 20
        assert len(slept) == 20
        assert len(caplog.records) == 1
        where = f"127.0.0.1:{listener.address[1]}"
        assert f"Cannot accept connections at {where}: Too many open files; raise the limit with" in caplog.text
        full.is_full = False
        while not listener._waiting:
            listener.wait(1010)
        assert now[0] < 1003
        assert listener._waiting[next(iter(listener._waiting))].address == address_of(caller)
    listener.close()


def test_all_listening_sockets_pause_together_and_new_ones_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(listener_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    first, second = (Full(fileno=listen("127.0.0.1", 0).detach()) for _ in range(2))
    listener = Listener(HOST, first, second)
    with ExitStack() as stack:
        for sock in (first, second):
            stack.enter_context(socket.create_connection(sock.getsockname(), timeout=5))
        while not first.asked + second.asked:
            listener.wait(now[0] + 1)
        third = Full(fileno=listen("127.0.0.1", 0).detach())
        third.is_full = False
        listener.add(third)
        stack.enter_context(socket.create_connection(third.getsockname(), timeout=5))
        listener.wait(now[0])
        assert (first.asked + second.asked, third.asked) == (1, 0)
        listener.remove(first)
        second.is_full = False
        now[0] = listener.next_deadline
        while len(listener._waiting) < 2:
            listener.wait(now[0])
    listener.close()


def test_a_listener_takes_one_free_port_for_each_host(scene: Scene) -> None:
    port = scene.listener.port_at("127.0.0.1")
    assert scene.listener.port_at("127.0.0.1") == port
    assert scene.listener.port_at("127.0.0.2") != 0
    for host in ("127.0.0.1", "127.0.0.2"):
        sock = socket.create_connection((host, scene.listener.port_at(host)), timeout=5)
        scene.keep(sock)
        sock.sendall(b"hello?")
    assert scene.refused(2).count("not Ringfort") == 2


def test_a_client_that_sends_while_it_makes_room_is_no_problem() -> None:
    scene = Scene(max_waiting=1)
    first = scene.call()
    scene.listener.wait(time.monotonic() + 0.2)
    connecting = scene.member()  # both are ready before the listener looks again
    first.sendall(b"RG")
    scene.accepted()
    connecting.result()
    assert "too many unauthenticated connections" in scene.refused()
    scene.close()


def test_a_thousand_refused_clients_are_few_lines_in_the_log_that_count_them_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(log_every=60.0)
    turned = 0
    with caplog.at_level(logging.DEBUG):
        for _ in range(1000):
            before = scene.listener._unlogged, len(caplog.records)
            scene.call(b"hello?").close()
            deadline = soon()
            while (scene.listener._unlogged, len(caplog.records)) == before:
                scene.listener.wait(deadline)
                assert time.monotonic() < deadline
            turned += 1
        assert len(caplog.records) == 1
        scene.listener.close()
    assert turned == 1000
    assert len(caplog.records) == 2
    assert "Refused 999 more" in caplog.text
    assert len(scene.listener.refusals) == 8
    scene.close()


# --- after the handshake ----------------------------------------------------------------------------------------------


def test_who_is_refused_hears_why(scene: Scene) -> None:
    connecting = scene.member()
    [accepted] = scene.accepted()
    scene.listener.refuse(accepted, Refused("rank_taken", "rank 1 is here already"))
    with pytest.raises(RankTakenError, match="rank 1 is here already"):
        connecting.result().hear(0, Hello, soon())
    assert "rank 1 is here already" in scene.listener.refusals[0]


def test_a_listener_that_closes_closes_on_those_outside(scene: Scene) -> None:
    sock = scene.call()
    scene.listener.wait(soon())
    scene.listener.close()
    assert sock.recv(1) == b""


# --- connections ------------------------------------------------------------------------------------------------------


def connections(encryption: str) -> tuple[Connection, Connection]:
    """Both ends of an open connection."""
    credentials = member() if encryption == "on" else None
    initiator, responder = Handshake(credentials, JOIN), Handshake(credentials)
    while not (initiator.is_open and responder.is_open):
        for one, other in ((initiator, responder), (responder, initiator)):
            data = bytes(one.outgoing)
            one.outgoing.clear()
            while data:
                piece, data = data[: other.wants], data[other.wants :]
                other.feed(piece)
    a, b = socket.socketpair()
    return Connection.of(a, initiator), Connection.of(b, responder)


@pytest.fixture(params=["on", "off"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, Connection]]:
    pair = connections(request.param)
    yield pair
    for connection in pair:
        connection.close()


def test_what_is_said_is_heard_and_nothing_behind_it(pair: tuple[Connection, Connection]) -> None:
    a, b = pair
    a.say(Ready(), soon())
    a.sock.sendall(b"data")
    assert b.hear(1, Hello, soon()) == Ready()
    assert b.sock.recv(10) == b"data"


def test_a_peer_that_does_not_answer_is_named(pair: tuple[Connection, Connection]) -> None:
    with pytest.raises(NoConnectionError, match="No answer in time from rank 7, which accepted the connection"):
        pair[0].hear(7, Hello, time.monotonic() + 0.05)


def test_a_peer_that_ends_instead_of_answering_is_named(pair: tuple[Connection, Connection]) -> None:
    pair[1].close()
    with pytest.raises(NoConnectionError, match="Connection closed by rank 7 before it answered"):
        pair[0].hear(7, Hello, soon())
    with pytest.raises(NoConnectionError, match="broke"):
        pair[0].say(Ready(), soon())


def test_a_refusal_is_raised_as_what_it_means(pair: tuple[Connection, Connection]) -> None:
    pair[1].say(Refused("rank_taken", "taken"), soon())
    with pytest.raises(RankTakenError, match="Refused by rank 7: taken"):
        pair[0].hear(7, Hello, soon())


def test_a_refusal_to_somebody_who_has_gone_is_no_error(pair: tuple[Connection, Connection]) -> None:
    pair[1].close()
    pair[0].refuse("failed", "too late")


@pytest.mark.parametrize("far", [1e10, 1e300])
def test_a_deadline_may_be_further_than_any_clock_counts(pair: tuple[Connection, Connection], far: float) -> None:
    pair[0].say(Ready(), far)
    assert pair[1].hear(1, Hello, far) == Ready()


def test_a_hello_that_was_changed_on_the_way_is_noticed() -> None:
    a, b = connections("on")
    a.say(Ready(), soon())
    b.sock.settimeout(5)
    record = bytearray(b.sock.recv(1000))
    record[-1] ^= 1
    a.sock.sendall(record)
    with pytest.raises(TamperedError):
        b.hear(1, Hello, soon())
    a.close()
    b.close()


def test_whoever_answers_without_the_secret_is_a_handshake_error_that_names_them() -> None:
    a, b = socket.socketpair()
    with a, b:
        b.sendall(preamble() + bytes(96))
        with pytest.raises(HandshakeError, match="Handshake with rank 7 failed: "):
            run(Connection.initiate(a, member(), JOIN, "rank 7"), soon())
