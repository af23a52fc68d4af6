"""What a forked child does with what it inherits."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from ringfort.backends.mesh import MeshBackend
from ringfort.config import DistributedConfig
from ringfort.context import DistributedContext
from ringfort.errors import ChannelClosedError
from ringfort.transport.forks import WeakGroup, keep_from_children
from ringfort.transport.socket_streams import SocketPoller, SocketStream


def in_child(check: Callable[[], None]) -> None:
    """Fails unless `check` returns in a forked child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_closes_its_copies_of_sockets_and_the_parents_stay() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        keep_from_children(ours)

        def check() -> None:
            assert ours.fileno() == -1
            assert theirs.fileno() != -1

        in_child(check)
        ours.send(b"x")
        assert theirs.recv(1) == b"x"


def test_an_object_that_is_gone_is_forgotten() -> None:
    group: WeakGroup[socket.socket] = WeakGroup()
    with socket.socket() as held:
        group.add(held)
        assert group.alive() == [held]
    del held
    assert group.alive() == []


def test_what_fails_to_be_abandoned_does_not_keep_the_rest() -> None:
    class Faulty:
        def abandon(self) -> None:
            raise ValueError("a mistake")

    faulty = keep_from_children(Faulty())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        keep_from_children(ours)
        in_child(lambda: None if ours.fileno() == -1 else os._exit(1))
    del faulty


def test_a_child_is_told_why_it_cannot_use_the_group_though_a_thread_held_its_locks() -> None:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    streams, poller = {1: SocketStream(ends[0])}, SocketPoller({1: ends[0]})
    with DistributedContext(MeshBackend(0, 2, DistributedConfig(timeout=5), streams, poller)) as ctx:  # type: ignore[arg-type]

        def check() -> None:
            with pytest.raises(ChannelClosedError, match="forked"):
                ctx.barrier()
            with pytest.raises(ChannelClosedError, match="forked"):
                ctx.barrier(async_op=True).wait()
            ctx.close()

        # As if another thread of the parent's were in the middle of a call.
        engine = ctx.backend.group.engine  # type: ignore[attr-defined]
        with ctx._runner.turn, ctx.metrics._lock, engine._lead:
            in_child(check)
        ends[1].close()
