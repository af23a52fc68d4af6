"""`Connection`: a socket whose handshake is done, over which hellos are exchanged until the engine takes the socket.

Everything here works on non-blocking sockets and is written once, as generators that yield whenever they have to wait
(`SocketSteps`). The training process runs them with `run`, which sleeps in poll(2); the control process runs the same
ones in its event loop (`cluster.net.waiting.run`); the listener resumes each when its selector says so. Only `say`
waits by itself: a new socket has room for a hello.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ringfort.errors import (
    DistributedError,
    HandshakeError,
    NoConnectionError,
    ProtocolError,
    RefusedError,
    TamperedError,
    TransportError,
)
from ringfort.identity.credentials import Credentials
from ringfort.transport import hello
from ringfort.transport.handshake import Handshake, RecordReader, sealed
from ringfort.transport.hello import MAX_HELLO, NOWHERE, Hello, Refused
from ringfort.transport.machine import Machine
from ringfort.transport.records import Opener, RecordState, Sealer
from ringfort.transport.stream import Stream
from ringfort.transport.tcp import sleep_on, tune

CLOSED_BY = "Connection closed by"
"""How the error of a peer begins that gave up in the handshake: nobody has refused it."""
_OTHER = "the other side"
"""The name of a peer that is not known by another name."""
_UNREAD = 4096
"""Bytes: more than a client has sent and we have not read when its handshake fails."""

T = TypeVar("T")
H = TypeVar("H", bound=Hello)
SocketSteps = Generator[tuple[socket.socket, int], None, T]
"""Yields a socket and the event of poll(2) to wait for. An `OSError` thrown into it says why that did not come."""
Purpose = Hello | Callable[[socket.socket], Hello]
"""What a connection is for, or a function that returns it for the connected socket."""


def run(steps: SocketSteps[T], deadline: float, beside: socket.socket | None = None) -> T:
    """Run `steps` in this thread and return their result. They get a `TimeoutError` at `deadline`, and a
    `ConnectionAbortedError` as soon as `beside`, another connection to the same peer, has ended."""
    try:
        waiting = next(steps)
        while True:
            try:
                sleep_on(*waiting, deadline, beside)
            except OSError as exc:
                waiting = steps.throw(exc)
            else:
                waiting = next(steps)
    except StopIteration as done:
        return done.value
    finally:
        steps.close()


def shake_hands(sock: socket.socket, handshake: Handshake, peer: str | None = None) -> SocketSteps[None]:
    """Perform either side of a handshake over `sock`, and read not a byte more. Raises what `Handshake.feed` raises,
    or `NoConnectionError`."""
    try:
        with _translated_errors(peer):
            while True:
                _send_at_once(sock, handshake)
                if handshake.is_open:
                    return
                try:
                    data = sock.recv(handshake.wants)
                except BlockingIOError:
                    yield sock, select.POLLIN
                    continue
                if not data:
                    raise NoConnectionError(f"{CLOSED_BY} {peer or _OTHER} in the handshake", peer=peer)
                handshake.feed(data)
    except DistributedError:
        with suppress(OSError, ProtocolError):
            _send_at_once(sock, handshake)
            sock.recv(_UNREAD)  # closing a socket with unread bytes resets the connection, and the answer could be lost
        raise


def _send_at_once(sock: socket.socket, handshake: Handshake) -> None:
    outgoing = handshake.outgoing
    if outgoing and sock.send(outgoing) < len(outgoing):
        raise ProtocolError("The other side does not read its handshake")  # a new socket has room for a whole handshake
    outgoing.clear()


class Session(msgspec.Struct, frozen=True):
    """A connection without its socket, so that another process of this machine can continue it. Contains keys."""

    identity: bytes
    machine: Machine
    sealer: RecordState | None
    opener: RecordState | None


@dataclass(eq=False, repr=False)
class Connection:
    """A connection to a peer that has proved its membership; with encryption off, to one that speaks the protocol."""

    sock: socket.socket
    identity: bytes
    """The key that the peer has proved; empty with encryption off."""
    sealer: Sealer | None
    opener: Opener | None
    purpose: Hello | None = None
    """What the connection is for, as the initiator said. None if another process has opened it."""
    address: str = ""
    """The other end as `host:port`, if it was accepted here."""
    machine: Machine = NOWHERE
    """The peer's machine, once it has told."""

    def __post_init__(self) -> None:
        self.sock.setblocking(False)
        self._reader = RecordReader(self.opener, MAX_HELLO)

    @classmethod
    def of(cls, sock: socket.socket, handshake: Handshake, address: str = "") -> Connection:
        """Return the connection that a completed handshake has made of a socket."""
        return cls(sock, handshake.identity, handshake.sealer, handshake.opener, handshake.purpose, address)

    @property
    def session(self) -> Session:
        """What `resume` needs beside the socket. This process must not use the connection afterwards."""
        sealer, opener = self.sealer and self.sealer.state, self.opener and self.opener.state
        return Session(self.identity, self.machine, sealer, opener)

    @classmethod
    def resume(cls, sock: socket.socket, session: Session) -> Connection:
        """Continue a connection that another process opened."""
        sealer = session.sealer and Sealer.resume(session.sealer)
        opener = session.opener and Opener.resume(session.opener)
        return cls(sock, session.identity, sealer, opener, machine=session.machine)

    @classmethod
    def initiate(
        cls, sock: socket.socket, credentials: Credentials | None, purpose: Purpose, peer: str | None = None
    ) -> SocketSteps[Connection]:
        """Perform the initiator's side of a handshake. Errors name the other side `peer`. Closes `sock` if it fails.

        Raises a `RefusedError` if the other side is of another version, cluster or mode, `HandshakeError` if it does
        not know the secret, `NoConnectionError` if it goes away.
        """
        sock.setblocking(False)
        try:
            handshake = Handshake(credentials, purpose(sock) if callable(purpose) else purpose)
            yield from shake_hands(sock, handshake, peer)
        except BaseException as exc:
            sock.close()
            if peer is None or not isinstance(exc, (TamperedError, HandshakeError, RefusedError)):
                raise
            if isinstance(exc, TamperedError):
                raise TamperedError(exc.why, peer=peer) from exc
            said = f"Handshake with {peer} failed: {exc}" if isinstance(exc, HandshakeError) else str(exc)
            raise type(exc)(said, peer=peer) from exc
        return cls.of(sock, handshake)

    def say(self, said: Hello, deadline: float) -> None:
        """Send a hello. Raises `NoConnectionError`."""
        data = memoryview(sealed(self.sealer, hello.encode(said)))
        try:
            while data:
                sleep_on(self.sock, select.POLLOUT, deadline)
                data = data[self.sock.send(data) :]
        except OSError as exc:
            raise NoConnectionError(f"Connection broken during a hello: {exc.strerror or exc}") from exc

    def hear(self, rank: int, kind: type[H], deadline: float) -> H:
        """Read a hello of this kind from `rank`, in this thread. Raises as `hearing`, and `ProtocolError` for another
        kind."""
        said = run(self.hearing(f"rank {rank}"), deadline)
        if not isinstance(said, kind):
            why = f"Unexpected message from rank {rank}: {type(said).__name__}, not {kind.__name__}"
            raise ProtocolError(why, peer=rank)
        return said

    def hearing(self, peer: str | None = None) -> SocketSteps[Hello]:
        """Read one hello, and not a byte more. Raises the error that a refusal stands for, `ProtocolError`,
        `TamperedError`, or `NoConnectionError` if the other side goes away."""
        with _translated_errors(peer):
            while (body := self._reader.next()) is None:
                yield self.sock, select.POLLIN
                data = self.sock.recv(self._reader.wants)
                if not data:
                    raise NoConnectionError(f"Connection closed by {peer or _OTHER} before it answered", peer=peer)
                self._reader.feed(data)
        said = hello.decode(body)
        if isinstance(said, Refused):
            raise hello.to_error(said, peer or _OTHER)
        return said

    def refuse(self, code: str, reason: str) -> None:
        """Tell the other side why it is refused, and close. Never raises."""
        with suppress(OSError, TransportError):  # it may have gone already
            self.say(Refused(code, reason), time.monotonic() + 1)
            self.sock.shutdown(socket.SHUT_WR)
        self.close()

    def close(self) -> None:
        self.sock.close()

    def stream(self) -> Stream:
        """Return the engine's view of the connection, which must not be used otherwise any more."""
        # Not at the top: the control process starts without NumPy.
        from ringfort.transport.socket_streams import SealedStream, SocketStream

        tune(self.sock)
        if self.sealer is None or self.opener is None:
            return SocketStream(self.sock)
        return SealedStream(self.sock, self.sealer, self.opener)


@contextmanager
def closed_on_error(connections: Mapping[Any, Connection]) -> Generator[None, None, None]:
    """Close all that are in `connections` by then if the block fails."""
    try:
        yield
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise


@contextmanager
def _translated_errors(peer: str | None) -> Generator[None, None, None]:
    name = peer or _OTHER
    try:
        yield
    except DistributedError:
        raise
    except TimeoutError as exc:
        raise NoConnectionError(f"No answer in time from {name}, which accepted the connection", peer=peer) from exc
    except OSError as exc:
        raise NoConnectionError(f"Connection to {name} broken: {exc.strerror or exc}", peer=peer) from exc
