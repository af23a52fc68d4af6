"""Peers named by a person."""

from __future__ import annotations

import asyncio

import pytest

from ringfort.cluster.discovery.static import DEFAULT_PORT, parse_peer, parse_peers, resolve
from ringfort.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("192.168.1.20", ("192.168.1.20", DEFAULT_PORT)),
        ("192.168.1.20:700", ("192.168.1.20", 700)),
        (" mac.local ", ("mac.local", DEFAULT_PORT)),
        ("mac.local:1", ("mac.local", 1)),
        ("fe80::1%eth0", ("fe80::1%eth0", DEFAULT_PORT)),
        ("[fe80::1%eth0]", ("fe80::1%eth0", DEFAULT_PORT)),
        ("[2001:db8::1]:700", ("2001:db8::1", 700)),
        ("::1", ("::1", DEFAULT_PORT)),
    ],
)
def test_a_port_may_be_left_out(text: str, parsed: tuple[str, int]) -> None:
    assert parse_peer(text) == parsed


@pytest.mark.parametrize(
    "text", ["", "host:", ":700", "host:x", "host:70000", "host:0", "a b", "http://host", "me@host"]
)
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="peer="):
        parse_peer(text)


def test_a_peer_named_twice_is_one() -> None:
    assert parse_peers(["a", f"a:{DEFAULT_PORT}", "b"]) == [("a", DEFAULT_PORT), ("b", DEFAULT_PORT)]


def test_a_name_becomes_addresses_and_an_unknown_one_becomes_none() -> None:
    assert asyncio.run(resolve("127.0.0.1", 700)) == ["127.0.0.1:700"]
    assert asyncio.run(resolve("::1", 700)) == ["[::1]:700"]
    assert asyncio.run(resolve("fe80::1%lo", 700)) == ["[fe80::1%lo]:700"]
    assert asyncio.run(resolve("." * 70, 700)) == []
