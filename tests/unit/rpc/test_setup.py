"""Agents' connections: each is with the rank whose identity the group knows, and with nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.connector import connect
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.terms import Terms
from ringfort.errors import HandshakeError, RefusedError
from ringfort.rpc import setup
from ringfort.transport.hello import Calls, Hello
from ringfort.transport.machine import Machine
from ringfort.transport.tcp import listen
from tests.helpers.background import Background
from tests.helpers.handshakes import member

TOKEN = bytes(16)


def terms() -> Terms:
    """Those of a machine of its own."""
    return Terms.begin(20, member(), Machine())


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(member(), listen("127.0.0.1", 0))
    yield listener
    listener.close()


def test_a_member_with_another_key_does_not_get_a_ranks_connection_and_the_rank_does(listener: Listener) -> None:
    rank = terms()
    keys = [b"", rank.credentials.identity.public_key]
    connections: dict[int, Connection] = {}
    accepting = Background(setup.accept_agents, listener, range(1, 2), TOKEN, keys, connections, terms())
    other = terms()
    claim = connect(0, [listener.address], Calls(1, TOKEN), other)
    with pytest.raises(RefusedError, match="for the agents of a group that has formed"):
        claim.hear(0, Hello, other.deadline)
    claim.close()
    connection = connect(0, [listener.address], Calls(1, TOKEN), rank)
    accepting.result()
    assert connections[1].identity == keys[1]
    for each in (connection, *connections.values()):
        each.close()


def test_whoever_answers_in_a_ranks_place_with_another_key_is_not_called(listener: Listener) -> None:
    here = terms()
    connections: dict[int, Connection] = {}
    keys = [b"", here.credentials.identity.public_key]
    accepting = Background(setup.accept_agents, listener, range(1, 2), TOKEN, keys, connections, terms())
    with pytest.raises(HandshakeError, match="Another machine answers"):
        connect(0, [listener.address], Calls(1, TOKEN), here, identity=member().identity.public_key)
    accepting.result()
    connections[1].close()
