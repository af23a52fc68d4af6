"""A short id stands for one whole key."""

from __future__ import annotations

import pytest

from ringfort.errors import HandshakeError
from ringfort.identity.keypair import KnownKeys, NodeIdentity


def test_a_key_is_known_by_its_short_id_however_often_it_comes() -> None:
    identity = NodeIdentity.ephemeral()
    keys = KnownKeys()
    assert [keys.name(identity.public_key) for _ in range(2)] == [identity.peer_id] * 2


def test_a_second_key_with_the_same_id_is_refused_and_the_first_still_known() -> None:
    keys = KnownKeys(id_of=lambda key: "aaaa-aaaa-aaaa-aaaa")
    assert keys.name(b"\1" * 32) == "aaaa-aaaa-aaaa-aaaa"
    with pytest.raises(HandshakeError, match="aaaa-aaaa-aaaa-aaaa belongs to another key"):
        keys.name(b"\2" * 32)
    assert keys.name(b"\1" * 32) == "aaaa-aaaa-aaaa-aaaa"


def test_no_more_keys_are_kept_than_there_is_room_for_and_the_last_seen_stay() -> None:
    keys = KnownKeys(2, lambda key: f"id {key[0]}")
    for first, last in ((1, 1), (2, 1), (1, 1), (3, 1)):  # 2 was not seen for longest
        keys.name(bytes((first, last)))
    keys.name(bytes((2, 9)))  # forgotten, so it may be another; and 1 makes room
    with pytest.raises(HandshakeError):
        keys.name(bytes((3, 9)))
