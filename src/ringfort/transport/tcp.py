"""TCP: resolving, listening, and sleeping on one socket or many. Foreign errors become ours here."""

from __future__ import annotations

import errno
import select
import socket
import sys
import time
from contextlib import suppress
from math import ceil
from struct import Struct

from ringfort.config import KIB, format_address
from ringfort.errors import TransportError
from ringfort.transport.forks import keep_from_children

_BACKLOG = 128
"""Connections the kernel holds for us: more than the largest group, so that all ranks may connect at once."""
_LOCAL_BUFFER = 256 * KIB
"""Bytes in flight on one machine; Linux doubles it for its own needs."""
LONGEST_SLEEP = 3600.0
"""Seconds: what is asked of the system at once. It counts milliseconds in 31 bits and would refuse a month."""
LOOKS = 8
"""How often a silent machine is looked at within the patience."""
HANG_UP: int = getattr(select, "POLLRDHUP", 0)
"""The peer has ended its direction; Linux tells so even when we do not want to read."""
PEER_ENDED = "its first connection has ended"
"""Why no further connection is made."""
_TCP_RXT_CONNDROPTIME = 0x80
"""macOS: seconds of retransmission after which a connection is dropped. Not in Python's socket module."""
_TCP_INFO = Struct("=3xB20xI28xI")
"""Of Linux's struct tcp_info: tcpi_probes, tcpi_unacked, tcpi_last_ack_recv (milliseconds)."""

_ADVICE = {
    errno.EADDRINUSE: "the port is in use; stop the other program or choose another port",
    errno.EACCES: "permission denied; choose a port above 1023 (those below need root)",
    errno.EADDRNOTAVAIL: "this machine does not have this address; `ip address` or `ifconfig` lists its addresses",
}


def resolve(host: str, port: int, *, passive: bool = False) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    """Return the addresses of a host name, as the operating system prefers them. Raises `TransportError`."""
    flags = socket.AI_PASSIVE if passive else 0
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as exc:  # a name that cannot be written in DNS is a UnicodeError
        why = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise TransportError(
            f"Unknown host {host!r} ({why}); check the spelling, or use its address", peer=host
        ) from exc
    return [(family, address) for family, _, _, _, address in found]


def tune(sock: socket.socket, *, is_bounded: bool = True) -> socket.socket:
    """Set what every data socket needs.

    Buffers are left to the kernel, which sizes them to the path. Only between processes of one machine it lets
    megabytes pile up, which are out of the cache when they are read: there, a bounded send buffer made a
    64 MiB all-reduce of 2 ranks 1.2 to 1.5 times as fast; for 4 ranks single runs
    disagreed. (Bounding the receive buffer as well made both slower.) For threads that block it is the other way
    round, so `is_bounded` is false: 16 and 64 MiB of 4 ranks took 0.85 and 0.74 of the time on 2 cores, and 4 to 16 MiB
    of 2 and of 4 ranks 0.9 on 16 cores.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError):  # it has ended already: whoever uses it finds that
        if is_bounded and sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER)
    return sock


def keep_alive(sock: socket.socket, patience: float) -> None:
    """Make the kernel probe the peer while nothing is under way, so that a machine that does not answer for `patience`
    seconds breaks the connection. While data are under way, `silence` tells."""
    interval = max(1, round(patience / 5))
    count = max(1, ceil(patience / interval) - 1)
    options = {"TCP_KEEPIDLE": interval, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": count}
    if not hasattr(socket, "TCP_KEEPIDLE"):  # macOS's name
        options["TCP_KEEPALIVE"] = options.pop("TCP_KEEPIDLE")
    with suppress(OSError):  # a connection that has broken already tells that when it is read
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if sys.platform == "darwin":
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, ceil(patience))


def silence(sock: socket.socket) -> float:
    """Return the seconds for which the other kernel has not answered what it was sent; 0 while it answers.

    TCP_USER_TIMEOUT would do this without us, but it also ends a connection whose other side answers and has no room
    left: that of a peer that computes, or holds its interpreter lock, while messages wait for it.
    """
    if not sys.platform.startswith("linux"):  # macOS ends such a connection by itself: see `keep_alive`
        return 0.0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # closed, or no TCP
        return 0.0
    probes, unacked, last_ack = _TCP_INFO.unpack(info)
    # One probe of a window may be under way; that a second one was sent means that the first was not answered.
    return last_ack / 1000 if unacked or probes >= 2 else 0.0


def listen(host: str, port: int) -> socket.socket:
    """Return a non-blocking listening socket. Raises `TransportError` if the address cannot be used."""
    family, address = resolve(host, port, passive=True)[0]
    sock = keep_from_children(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        raise TransportError(f"Cannot listen on {format_address(host, port)}: {_in_words(exc)}") from exc
    return sock


def listen_everywhere() -> socket.socket:
    """Return a socket that listens on all addresses of this machine, IPv6 and IPv4, on a free port."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # switched off for this network
            sock = socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
            sock.setblocking(False)
            return keep_from_children(sock)
    return listen("", 0)


def adopt_listener(fd: int) -> socket.socket:
    """Return the listening socket that a launcher opened for this process."""
    try:
        sock = keep_from_children(socket.socket(fileno=fd))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as exc:
        raise TransportError(
            f"File descriptor {fd} is not a listening socket: {_in_words(exc)}. A launcher opens it for a rank. "
            "A program that a rank starts, and that is none itself, needs an environment without RANK and "
            "RINGFORT_LISTEN_FD, or `ringfort run`"
        ) from exc
    return sock


def _in_words(exc: OSError) -> str:
    return _ADVICE.get(exc.errno or 0, exc.strerror or str(exc))


def sleep_on(sock: socket.socket, event: int, deadline: float, beside: socket.socket | None = None) -> None:
    """Return when `sock` has `event`, of those of poll(2). Raises `TimeoutError` at `deadline`, and
    `ConnectionAbortedError` as soon as `beside`, another connection with the same peer, has ended."""
    poll = select.poll()
    poll.register(sock, event)
    if beside is not None:
        poll.register(beside, HANG_UP)
    ready: list[int] = []
    while not ready:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        ready = [fd for fd, _ in poll.poll(min(left, LONGEST_SLEEP) * 1000)]
    if sock.fileno() not in ready:
        raise ConnectionAbortedError(errno.ECONNABORTED, PEER_ENDED)


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the other side has ended, or this side has shut it down, even if something is still unread."""
    poll = select.poll()
    poll.register(sock, HANG_UP)
    return bool(poll.poll(0))


def is_ended(sock: socket.socket) -> bool:
    """Whether the other side of a non-blocking socket has ended and everything was read. Reads nothing."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
