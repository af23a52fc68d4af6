"""Peers that a person named: `host`, `host:port`, `[v6]:port`. One is enough, because peers introduce each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Final

from ringfort.cluster.discovery.interfaces import parse_ip
from ringfort.config import format_address, parse_address
from ringfort.errors import ConfigError

DEFAULT_PORT: Final = 52415
"""The port that a peer listens on if it is free, and that is dialled if no port was given. No service is assigned a
port in this range."""
MAX_RESOLVED: Final = 8
"""Addresses of one name that are tried."""


def parse_peer(text: str) -> tuple[str, int]:
    """Return the host and the port in `text`. Raise `ConfigError` if it is invalid."""
    text = text.strip()
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    port = DEFAULT_PORT
    if ":" in host and parse_ip(host) is None:  # the colons of an IPv6 address lead to no port
        host, port = parse_address(text, "peer")
    if not host or any(character.isspace() or character in "/@" for character in host):
        raise ConfigError("peer", text, "must be a host name or an address, such as 192.168.1.20 or mac.local:52415")
    if port == 0:
        raise ConfigError("peer", text, "nobody listens on port 0; leave the port out to use the usual one")
    return host, port


def parse_peers(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Return the distinct hosts and ports in `texts`, in order."""
    return list(dict.fromkeys(parse_peer(text) for text in texts))


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host as `address:port`, in the system's order; none if the name is unknown now.

    That is not an error: on many networks, a machine has a name only while it is on.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # The host with its scope, which a link-local IPv6 address needs.
        hosts = [socket.getnameinfo(one[4], socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0] for one in found]
    except (OSError, UnicodeError):
        return []
    return [format_address(host, port) for host in dict.fromkeys(hosts)][:MAX_RESOLVED]
