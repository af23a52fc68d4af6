"""Peers that a person named: `host`, `host:port`, `[v6]:port`. One is enough, because peers introduce each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Final

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
    if text.startswith("[") and text.endswith("]"):
        return _checked(text[1:-1], DEFAULT_PORT, text)
    if ":" not in text or _is_v6(text):  # in an IPv6 address without brackets no colon leads to a port
        return _checked(text, DEFAULT_PORT, text)
    return _checked(*parse_address(text, "peer"), text)


def parse_peers(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Return the distinct hosts and ports in `texts`, in order."""
    return list(dict.fromkeys(parse_peer(text) for text in texts))


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host as `address:port`, in the system's order; none if the name is unknown now.

    That is not an error: on many networks, a machine has a name only while it is on.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    numeric: dict[str, None] = {}
    for family, _, _, _, address in found:
        if family in (socket.AF_INET, socket.AF_INET6):
            numeric[format_address(_with_scope(address), port)] = None
    return list(numeric)[:MAX_RESOLVED]


def _with_scope(address: tuple[object, ...]) -> str:
    """Return the host with its scope, the last of the four parts, which a link-local IPv6 address needs."""
    text = str(address[0]).partition("%")[0]
    scope = address[3] if len(address) == 4 else 0
    if isinstance(scope, int) and scope:
        try:
            return f"{text}%{socket.if_indextoname(scope)}"
        except OSError:
            return text
    return text


def _is_v6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    except (OSError, ValueError):
        return False
    return True


def _checked(host: str, port: int, text: str) -> tuple[str, int]:
    if not host or any(character.isspace() or character in "/@" for character in host):
        raise ConfigError("peer", text, "must be a host name or an address, such as 192.168.1.20 or mac.local:52415")
    if port == 0:
        raise ConfigError("peer", text, "nobody listens on port 0; leave the port out to use the usual one")
    return host, port
