"""A connection while a group forms: hellos said and heard in turn; afterwards its socket is a `Stream`."""

from __future__ import annotations

import select
import socket
import time

import msgspec

from ringfort.errors import (
    HandshakeError,
    NoConnectionError,
    ProtocolError,
    RefusedError,
    TamperedError,
    TransportError,
)
from ringfort.identity.credentials import Credentials
from ringfort.transport import hello
from ringfort.transport.handshake import Handshake, sealed
from ringfort.transport.hello import MAX_HELLO, NOWHERE, Hello, Refused
from ringfort.transport.machine import Machine
from ringfort.transport.records import LENGTH, Opener, RecordState, Sealer
from ringfort.transport.stream import Stream
from ringfort.transport.tcp import LONGEST_SLEEP, SocketStream, sleep_on, tune


class Session(msgspec.Struct, frozen=True):
    """What a connection is beside its socket, for another process of this machine that goes on with it. Holds keys."""

    identity: bytes
    machine: Machine
    sealer: RecordState | None
    opener: RecordState | None

    @classmethod
    def of(cls, handshake: Handshake, machine: Machine) -> Session:
        """Of an open connection to a peer on `machine`, at a moment when no record is under way."""
        sealer, opener = handshake.sealer, handshake.opener
        return cls(handshake.identity, machine, sealer and sealer.state, opener and opener.state)


class Connection:
    """An open connection to a peer that has proved itself, or with encryption off at least named itself."""

    def __init__(self, sock: socket.socket, handshake: Handshake) -> None:
        self.sock = sock
        self.identity = handshake.identity
        self.machine: Machine = NOWHERE
        """The peer's, once it has said so."""
        self._sealer: Sealer | None = handshake.sealer
        self._opener: Opener | None = handshake.opener

    @classmethod
    def resume(cls, sock: socket.socket, session: Session) -> Connection:
        """Goes on with a connection that another process opened."""
        connection = cls.__new__(cls)
        connection.sock, connection.identity, connection.machine = sock, session.identity, session.machine
        connection._sealer = session.sealer and Sealer.resume(session.sealer)
        connection._opener = session.opener and Opener.resume(session.opener)
        return connection

    @classmethod
    def open(
        cls,
        sock: socket.socket,
        credentials: Credentials | None,
        purpose: Hello,
        peer: str,
        deadline: float,
        *,
        beside: socket.socket | None = None,
    ) -> Connection:
        """The initiator's side of a handshake. Raises a `RefusedError` if the other side is of another version, cluster
        or mode, `HandshakeError` if it does not know the secret, `NoConnectionError` if it went away, or if `beside`,
        another connection with it, has ended."""
        handshake = Handshake(credentials, purpose)
        _write(sock, handshake.outgoing, deadline)
        try:
            while not handshake.is_open:
                handshake.outgoing.clear()
                if beside is not None:
                    _await(sock, peer, deadline, beside)
                handshake.feed(_read(sock, handshake.wants, peer, deadline))
                _write(sock, handshake.outgoing, deadline)
        except TamperedError as exc:
            raise TamperedError(exc.why, peer=peer) from exc
        except HandshakeError as exc:
            raise HandshakeError(f"{peer}: {exc}", peer=peer) from exc
        except RefusedError as exc:
            raise type(exc)(str(exc), peer=peer) from exc
        return cls(sock, handshake)

    def say(self, said: Hello, deadline: float) -> None:
        """Sends a hello. Raises `TransportError`."""
        _write(self.sock, sealed(self._sealer, hello.encode(said)), deadline)

    def hear(self, peer: str, deadline: float) -> Hello:
        """Reads one hello, and not a byte more. Raises what a refusal means, or `NoConnectionError`."""
        head = _read_all(self.sock, LENGTH.size, peer, deadline)
        if self._opener is None:
            (length,) = LENGTH.unpack(head)
            if length > MAX_HELLO:
                raise ProtocolError(f"{peer} announces a hello of {length} bytes; the limit is {MAX_HELLO}")
            body = _read_all(self.sock, length, peer, deadline)
        else:
            length = self._opener.body_length(head)
            plain = bytearray(length + LENGTH.size - self._opener.overhead)
            self._opener.open(head + _read_all(self.sock, length, peer, deadline), memoryview(plain))
            body = bytes(plain)
        said = hello.decode(body)
        if isinstance(said, Refused):
            raise hello.to_error(said, peer)
        return said

    def refuse(self, code: str, reason: str) -> None:
        """Says no, and closes. Never raises."""
        try:
            self.say(Refused(code, reason), time.monotonic() + 1)
            self.sock.shutdown(socket.SHUT_WR)
        except (OSError, TransportError):
            pass  # they have gone already
        self.close()

    def close(self) -> None:
        self.sock.close()

    def stream(self) -> Stream:
        """The connection for the engine. The connection is not used any more."""
        from ringfort.transport.sealed import SealedStream  # not at the top: the control process starts without NumPy

        tune(self.sock)
        if self._sealer is None or self._opener is None:
            return SocketStream(self.sock)
        return SealedStream(self.sock, self._sealer, self._opener)


def _left(deadline: float) -> float:
    """Raises `TimeoutError` when there is no time left: else who sends a byte now and then would be heard for ever."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time for it is over")
    return min(left, LONGEST_SLEEP)


def _write(sock: socket.socket, data: bytes | bytearray, deadline: float) -> None:
    if not data:
        return
    try:
        sock.settimeout(_left(deadline))
        sock.sendall(data)
    except OSError as exc:
        raise NoConnectionError(f"the connection broke while hello: {exc.strerror or exc}") from exc


def _await(sock: socket.socket, peer: str, deadline: float, beside: socket.socket) -> None:
    try:
        sleep_on(sock, select.POLLIN, deadline, beside)
    except OSError as exc:
        raise NoConnectionError(f"{peer} did not answer: {exc.strerror or exc}", peer=peer) from exc


def _read(sock: socket.socket, count: int, peer: str, deadline: float) -> bytes:
    try:
        sock.settimeout(_left(deadline))
        data = sock.recv(count)
    except TimeoutError as exc:
        raise NoConnectionError(f"{peer} accepted the connection but did not answer in time", peer=peer) from exc
    except OSError as exc:
        raise NoConnectionError(f"{peer} broke the connection: {exc.strerror or exc}", peer=peer) from exc
    if not data:
        raise NoConnectionError(f"{peer} closed the connection before it answered", peer=peer)
    return data


def _read_all(sock: socket.socket, count: int, peer: str, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        data += _read(sock, count - len(data), peer, deadline)
    return data
