"""Links over connections that end while the group forms."""

from __future__ import annotations

import socket

import pytest

from ringfort import DistributedConfig
from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.links import links_over
from ringfort.errors import NoConnectionError
from ringfort.transport.tcp import tune


def ended() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that one side has shut down and the other closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname(), timeout=10)
        there, _ = server.accept()
    here.shutdown(socket.SHUT_RDWR)
    assert there.recv(1) == b""
    there.close()
    assert here.recv(1) == b""  # then it has no peer any more
    with pytest.raises(OSError, match="not connected"):
        here.getpeername()
    return here, there


def test_a_connection_that_has_ended_is_the_error_of_a_lost_peer() -> None:
    """The epoch ends while its group forms: the members try the next one. Any other error would end the program."""
    here, _ = ended()
    connections = {0: Connection(here, b"", None, None)}
    with pytest.raises(NoConnectionError, match="rank 0 ended before the group had formed"):
        links_over(1, connections, DistributedConfig(encryption="off", shared_memory="off", timeout=5), None)
    assert here.fileno() == -1


def test_a_socket_that_has_ended_can_be_tuned() -> None:
    here, _ = ended()
    with here:
        assert tune(here) is here
