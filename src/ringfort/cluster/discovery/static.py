"""Peers that a person named: `host`, `host:port`, `[v6]:port`. One is enough, since peers introduce each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Final

from ringfort.config import format_address, parse_address
from ringfort.errors import ConfigError

DEFAULT_PORT: Final = 52415
"""Where a peer listens if it can and where one is looked for whose port was not said. In the range that nobody is
assigned a port from."""
MAX_RESOLVED: Final = 8
"""Addresses of one name that are tried."""


def parse_peer(text: str) -> tuple[str, int]:
    """A host and a port. Raises `ConfigError` with what is wrong."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return _checked(text[1:-1], DEFAULT_PORT, text)
    if ":" not in text or _is_v6(text):  # in an IPv6 address without brackets no colon leads to a port
        return _checked(text, DEFAULT_PORT, text)
    return _checked(*parse_address(text, "peer"), text)


def parse_peers(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Each of them once, in order."""
    return list(dict.fromkeys(parse_peer(text) for text in texts))


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host as `address:port`, in the system's order; none if it is not known now.

    Not an error: a machine that is off has no name in many homes, and gets it back when it is on.
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
    """An IPv6 link-local address means nothing without its interface, which is the last of the four parts."""
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
