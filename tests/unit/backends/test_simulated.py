"""The simulated group: faults and time as the real world has them."""

from __future__ import annotations

from typing import Any

import pytest

from ringfort import DistributedConfig, SimulatedBackend
from ringfort.errors import ChannelClosedError, InvalidRankError, InvalidWorldSizeError, PeerLostError, SelfSendError
from ringfort.testing import VirtualClock, run_ranks
from tests.helpers.background import Background


@pytest.mark.parametrize("world_size", [0, -1, 1.0, True, "2", None])
def test_a_world_size_below_one_is_refused(world_size: Any) -> None:
    with pytest.raises(InvalidWorldSizeError, match=f"world_size={world_size!r}"):
        SimulatedBackend.create_group(world_size)


def test_the_ranks_come_in_order_with_the_configuration() -> None:
    config = DistributedConfig(timeout=7)
    group = SimulatedBackend.create_group(4, config=config)
    assert [backend.rank for backend in group] == [0, 1, 2, 3]
    assert all(backend.world_size == 4 and backend.config is config for backend in group)
    run_ranks(group, lambda backend: backend.close())


def test_a_killed_rank_is_lost_to_the_others_and_closed_to_itself() -> None:
    group = SimulatedBackend.create_group(3)
    group[1].kill()
    with pytest.raises(PeerLostError) as caught:
        group[0].recv(bytearray(1), 1)
    assert caught.value.peer == 1
    with pytest.raises(ChannelClosedError, match="killed"):
        group[1].send(b"x", 0)
    group[0].send(b"x", 2)
    run_ranks(group, lambda backend: backend.close())


def test_a_cut_cable_is_silent_both_ways_until_it_is_mended() -> None:
    clock = VirtualClock()
    a, b, c = group = SimulatedBackend.create_group(3, clock=clock)
    a.cut(1)
    a.send(b"to b", 1)
    b.send(b"to a", 0)
    waiting = [Background(x.recv, bytearray(4), y.rank) for x, y in ((a, b), (b, a))]
    clock.wait_for_sleepers(2)
    a.send(b"x", 2)  # the other cables are whole
    c.recv(bytearray(1), 0)
    assert not any(call.is_over for call in waiting)
    a.cut(1, is_cut=False)
    for call in waiting:
        call.result()
    run_ranks(group, lambda backend: backend.kill())


def test_a_cable_to_nobody_cannot_be_cut() -> None:
    group = SimulatedBackend.create_group(2)
    with pytest.raises(InvalidRankError, match="peer=2"):
        group[0].cut(2)
    with pytest.raises(SelfSendError):
        group[0].cut(0)
    run_ranks(group, lambda backend: backend.close())
