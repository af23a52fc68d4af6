"""A group whose last reference goes without a close."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from ringfort.backends.mesh import MeshBackend
from ringfort.backends.simulated import SimulatedBackend
from ringfort.config import DistributedConfig
from ringfort.context import DistributedContext
from ringfort.errors import PeerLostError
from ringfort.transport.socket_streams import SocketPoller, SocketStream

CONFIG = DistributedConfig(timeout=30)


@pytest.fixture
def pair() -> Iterator[list[DistributedContext]]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    group = [
        DistributedContext(
            MeshBackend(rank, 2, CONFIG, {1 - rank: SocketStream(end)}, SocketPoller({1 - rank: end}))  # type: ignore[dict-item]
        )
        for rank, end in enumerate(ends)
    ]
    yield group
    for context in group:
        context.close()


def together(group: list[DistributedContext]) -> None:
    """An all-reduce of each kind that is kept ready for the next."""
    for size in (4, 50_000):
        threads = [threading.Thread(target=ctx.all_reduce, args=(np.ones(size, np.float32),)) for ctx in group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)


def test_it_goes_with_its_last_reference_and_its_peer_has_lost_it(pair: list[DistributedContext]) -> None:
    together(pair)
    together(pair)
    gone = weakref.ref(pair[0].backend)
    gc.disable()  # which might find it later: the peer must not wait for that
    try:
        del pair[0]
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(PeerLostError, match="dropped the group") as caught:
        pair[0].all_reduce(np.ones(4, np.float32))
    assert caught.value.peer == 0


def test_another_engine_does_not_keep_it() -> None:
    pytest.importorskip("torch")
    from ringfort.backends.engines.gloo import GlooNative

    [backend] = SimulatedBackend.create_group(1)
    engine = backend.group.native = GlooNative(backend.group, lambda: None, lambda: None)
    gone = weakref.ref(backend)
    gc.disable()
    try:
        del backend
        assert gone() is None
        assert not engine.is_stuck
    finally:
        gc.enable()


def test_it_is_said_in_order_so_what_needs_nothing_more_of_it_goes_on(pair: list[DistributedContext]) -> None:
    pair[0].send(np.full(3, 7.0), 1)
    del pair[0]
    into = np.zeros(3)
    pair[0].recv(into, 0)
    assert into.tolist() == [7.0, 7.0, 7.0]


def test_it_may_be_collected_in_any_thread_in_the_middle_of_anything() -> None:
    """Here in the thread of its peer, which holds the lock of the pipe between them."""
    group = SimulatedBackend.create_group(2, config=CONFIG)
    peer, dropped = group[1], [group[0]]
    del group
    pipe = peer._pollers[0].streams[0].outgoing
    with pipe._lock:
        dropped.clear()
    with pytest.raises(PeerLostError):
        peer.recv(bytearray(1), 0)
    peer.close()


def test_a_sub_group_keeps_the_group_that_it_is_part_of(pair: list[DistributedContext]) -> None:
    part = pair[0].sub_group([0, 1])
    other = pair[1].sub_group([0, 1])
    assert part is not None
    assert other is not None
    del pair[0]
    together([part, other])
