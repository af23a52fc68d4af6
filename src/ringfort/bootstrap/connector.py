"""The connector: opens a TCP connection, performs the handshake for a purpose, and checks who has answered."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Sequence

from ringfort.bootstrap.connection import Connection, Purpose, SocketSteps, run
from ringfort.bootstrap.terms import Address, Terms
from ringfort.config import format_address
from ringfort.errors import HandshakeError, NoConnectionError, RendezvousTimeoutError
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import peer_id_of
from ringfort.transport import tcp
from ringfort.transport.forks import keep_from_children
from ringfort.transport.hello import Hello

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
"""Seconds between attempts: short at first, because ranks are usually started together."""
_PAUSE_AFTER_ACCEPT = 0.05
"""Seconds before the next attempt where a listener answered and then dropped the connection."""
_CONNECT_TIMEOUT = 3.0
"""Seconds for one address to accept: one that swallows packets must not use up the time of the others."""


def connect(
    rank: int,
    addresses: Sequence[Address],
    purpose: Purpose,
    terms: Terms,
    *,
    identity: bytes | None = None,
    beside: socket.socket | None = None,
) -> Connection:
    """Connect to `rank`, which listens at one of `addresses`, for `purpose`.

    Attempts are repeated until the deadline: the rank may not listen yet, and a flooded listener may drop a member.

    Raises `RendezvousTimeoutError` at the deadline; `NoConnectionError` as soon as `beside`, another connection to
    the same rank, has ended; `HandshakeError` if the other side proves another `identity` than expected or none;
    `RefusedError` if it differs in version, cluster or mode.
    """
    reasons: dict[str, str] = {}
    pause = _FIRST_PAUSE
    while True:
        for host, port in addresses:
            address = format_address(host, port)
            try:
                sock = _open_first(host, port, terms.deadline, beside)
            except OSError as exc:  # `TransportError` of `resolve` is one too
                reasons[address] = str(exc.strerror or exc)
                continue
            try:
                name = f"rank {rank} at {address}"
                connection = run(Connection.initiate(sock, terms.credentials, purpose, name), terms.deadline, beside)
            except NoConnectionError as exc:
                reasons[address] = str(exc)
                pause = _PAUSE_AFTER_ACCEPT
            else:
                _check_identity(connection, identity, rank)
                return connection
        if beside is not None and tcp.has_hung_up(beside):
            raise NoConnectionError(f"No answer from rank {rank}: {tcp.PEER_ENDED}", peer=rank)
        left = terms.deadline - time.monotonic()
        if left <= 0:
            lines = [
                *(f"{address}: {reason}" for address, reason in reasons.items()),
                "to try: check that the other side runs, that its address is right, and that no firewall blocks it",
            ]
            raise RendezvousTimeoutError(
                f"looking for rank {rank}", terms.timeout, missing=[rank], state="\n".join(lines)
            )
        time.sleep(min(pause, left))
        pause = min(pause * 1.6, _LONGEST_PAUSE)


def _check_identity(connection: Connection, identity: bytes | None, rank: int) -> None:
    if identity is not None and connection.identity != identity:
        connection.close()
        proved, expected = (peer_id_of(key) if key else "no identity" for key in (connection.identity, identity))
        why = f"Another machine answers at the address of rank {rank}: {proved}, not {expected}"
        raise HandshakeError(why, peer=rank)


def _open_first(host: str, port: int, deadline: float, beside: socket.socket | None) -> socket.socket:
    failure: OSError | None = None
    for family, address in tcp.resolve(host, port):
        seconds = max(0.05, min(deadline - time.monotonic(), _CONNECT_TIMEOUT))
        try:
            return run(_open_socket(family, address), time.monotonic() + seconds, beside)
        except OSError as exc:
            failure = exc
    raise failure or OSError(errno.EHOSTUNREACH, "no address found")


def open_connection(
    family: int, address: tuple[object, ...], credentials: Credentials | None, purpose: Hello
) -> SocketSteps[Connection]:
    """Connect to `address`, once. Raises `NoConnectionError`, and as `Connection.initiate`."""
    try:
        sock = yield from _open_socket(family, address)
    except OSError as exc:
        raise NoConnectionError(exc.strerror or str(exc)) from exc
    return (yield from Connection.initiate(sock, credentials, purpose))


def _open_socket(family: int, address: tuple[object, ...]) -> SocketSteps[socket.socket]:
    sock = keep_from_children(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            yield sock, select.POLLOUT
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if sock.getsockname() == sock.getpeername():
            # Connecting to a free port of the ephemeral range may meet itself (TCP's simultaneous open).
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock
