"""Addresses of ranks: where to listen so that the others can connect, and how an address looks from another machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from ringfort.bootstrap.terms import Address
from ringfort.config import parse_address
from ringfort.errors import ConfigError
from ringfort.transport import tcp


def is_loopback(host: str) -> bool:
    """Return whether `host` is an address that only its own machine can reach."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(address: tuple[str, ...]) -> str:
    """Return the host of a socket's address, with the interface that a link-local one needs."""
    host = address[0]
    return f"{host}%{address[3]}" if host.lower().startswith("fe80:") and "%" not in host else host


def parse_master(master: str | Sequence[str] | None) -> list[Address]:
    """Return the addresses of rank 0. Raises `ConfigError`."""
    if not master:
        raise ConfigError(
            "master", None, "missing; pass rank 0's address as host:port, or set MASTER_ADDR and MASTER_PORT"
        )
    addresses = [parse_address(text, "master") for text in ([master] if isinstance(master, str) else master)]
    if any(port == 0 for _, port in addresses):
        raise ConfigError("master", master, "other ranks cannot connect to port 0; choose a port above 1023")
    return addresses


def listen_as_master(address: Address) -> socket.socket:
    """Listen at the address that rank 0 was given. Raises `TransportError`."""
    host, port = address
    return tcp.listen(listening_host(host, host if is_loopback(host) else str(tcp.resolve(host, 0)[0][1][0])), port)


def listening_host(master: str, local: str) -> str:
    """Return the host to listen at, where `local` is this machine's address on the path to `master`.

    If `local` is loopback only because a machine resolves its own name that way (Debian's 127.0.1.1), other machines
    use another interface: the result is empty, which stands for all of them.
    """
    return "" if is_loopback(local) and not is_loopback(master) else local


def reachable_from(sock: socket.socket, address: Address) -> Address:
    """Return the address of another rank as seen from here, where `sock` is connected to rank 0, which told it.

    Loopback means rank 0's machine. A link-local address needs the name of our own interface.
    """
    host, port = address
    mine = sock.getsockname()
    if is_loopback(host) and not is_loopback(mine[0]):
        host = sock.getpeername()[0]
    if host.lower().startswith("fe80:") and len(mine) == 4:  # a scope in it is that of the other machine
        host = f"{host.partition('%')[0]}%{mine[3]}"
    return host, port
