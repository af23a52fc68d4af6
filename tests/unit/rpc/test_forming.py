"""Agents' connections: each is with the rank whose identity the group knows, and with nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfort.backends.rendezvous import Terms
from ringfort.errors import HandshakeError, RefusedError
from ringfort.rpc import forming
from ringfort.transport.channel import Channel
from ringfort.transport.door import Door
from ringfort.transport.greeting import Calls
from ringfort.transport.machine import Machine
from ringfort.transport.tcp import connect, listen
from tests.helpers.openings import member
from tests.unit.transport.background import Background

TOKEN = bytes(16)


def terms() -> Terms:
    """Those of a machine of its own."""
    return Terms.begin(20, member(), Machine())


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door(listen("127.0.0.1", 0), member())
    yield door
    door.close()


def test_a_member_with_another_key_does_not_get_a_ranks_connection_and_the_rank_does(door: Door) -> None:
    rank = terms()
    keys = [b"", rank.credentials.identity.public_key]
    channels: dict[int, Channel] = {}
    accepting = Background(forming._accept, [door], range(1, 2), TOKEN, keys, channels, terms())
    other = terms()
    claim = Channel.open(
        connect([door.address], other.deadline), other.credentials, Calls(1, TOKEN), "rank 0", other.deadline
    )
    with pytest.raises(RefusedError, match="for the agents of a group that has formed"):
        claim.hear("rank 0", other.deadline)
    claim.close()
    sock = connect([door.address], rank.deadline)
    channel = Channel.open(sock, rank.credentials, Calls(1, TOKEN), "rank 0", rank.deadline)
    accepting.result()
    assert channels[1].identity == keys[1]
    for each in (channel, *channels.values()):
        each.close()


def test_whoever_answers_in_a_ranks_place_with_another_key_is_not_called(door: Door) -> None:
    here = terms()
    channels: dict[int, Channel] = {}
    keys = [b"", here.credentials.identity.public_key]
    accepting = Background(forming._accept, [door], range(1, 2), TOKEN, keys, channels, terms())
    with pytest.raises(HandshakeError, match="another machine answers"):
        forming._knock(0, [door.address], Calls(1, TOKEN), member().identity.public_key, here)
    accepting.result()
    channels[1].close()
