"""Sub-groups: who is in them, by which number, and that they leave each other alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ringfort import SimulatedBackend, SubBackend
from ringfort.errors import InvalidArgumentError, InvalidRankError, InvalidWorldSizeError, OperationTimeoutError
from ringfort.testing import VirtualClock, run_ranks
from tests.helpers.background import Background


@pytest.fixture
def group() -> Iterator[list[SimulatedBackend]]:
    group = SimulatedBackend.create_group(5)
    yield group
    run_ranks(group, lambda backend: backend.close())


def test_members_are_sorted_and_counted_once(group: list[SimulatedBackend]) -> None:
    sub = SubBackend(group[3], [4, 1, 3, 1])
    assert (sub.rank, sub.world_size, sub.group.members) == (1, 3, (1, 3, 4))
    assert [sub.to_global(rank) for rank in range(3)] == [1, 3, 4]
    assert [sub.to_local(rank) for rank in (1, 3, 4)] == [0, 1, 2]
    assert sub.parent is group[3]
    assert sub.config is group[3].config


def test_members_may_be_anything_that_can_be_iterated(group: list[SimulatedBackend]) -> None:
    assert SubBackend(group[0], iter({0, 2})).group.members == (0, 2)


def test_a_nested_group_counts_in_its_parents_ranks_and_knows_its_outermost(group: list[SimulatedBackend]) -> None:
    outer = SubBackend(group[4], [1, 3, 4])
    inner = SubBackend(outer, [2, 0])
    assert (inner.rank, inner.world_size) == (1, 2)
    assert [inner.to_global(rank) for rank in range(2)] == [0, 2]
    assert inner.group.members == (1, 4)


@pytest.mark.parametrize("members", [[5], [0, -1], [0, True], [0, "1"], [0, 1.0]])
def test_a_member_that_is_no_rank_of_the_parent_is_refused(group: list[SimulatedBackend], members: list[Any]) -> None:
    with pytest.raises(InvalidRankError, match="members="):
        SubBackend(group[0], members)


def test_a_group_without_this_rank_is_refused(group: list[SimulatedBackend]) -> None:
    with pytest.raises(InvalidRankError, match="rank=0: the ranks of this group are 1, 2"):
        SubBackend(group[0], [1, 2])


def test_a_group_without_members_is_refused(group: list[SimulatedBackend]) -> None:
    with pytest.raises(InvalidWorldSizeError):
        SubBackend(group[0], [])


@pytest.mark.parametrize("members", [5, None])
def test_members_that_are_no_list_are_refused(group: list[SimulatedBackend], members: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="members"):
        SubBackend(group[0], members)


@pytest.mark.parametrize("rank", [-1, 2, "0", None, True])
def test_a_number_outside_the_group_has_no_translation(group: list[SimulatedBackend], rank: Any) -> None:
    sub = SubBackend(group[3], [3, 4])
    with pytest.raises(InvalidRankError):
        sub.to_global(rank)
    with pytest.raises(InvalidArgumentError):
        sub.to_local(rank)


def test_every_sub_group_has_a_channel_that_its_members_agree_on(group: list[SimulatedBackend]) -> None:
    def comm_ids(rank: int) -> list[int]:
        outer = SubBackend(group[rank], [0, 1, 2])
        return [
            outer.group.comm_id,
            SubBackend(group[rank], [0, 1, 2]).group.comm_id,  # a twin
            SubBackend(group[rank], [0, 1]).group.comm_id,
            SubBackend(outer, [0, 1]).group.comm_id,
            SubBackend(outer, [0, 1, 2]).group.comm_id,
        ]

    first, second = comm_ids(0), comm_ids(1)
    assert first == second
    assert len({0, *first}) == 6


def test_closing_a_sub_group_leaves_its_parent_open(group: list[SimulatedBackend]) -> None:
    subs = [SubBackend(backend, range(5)) for backend in group]
    for sub in subs:
        sub.close()
    assert run_ranks(group, lambda backend: backend.barrier()) == [None] * 5


def test_traffic_is_the_whole_processs(group: list[SimulatedBackend]) -> None:
    sub = SubBackend(group[0], [0, 1])
    group[0].send(b"12", 1)
    sub.send(b"345", 1)
    assert sub.traffic() == group[0].traffic()
    assert sub.traffic().bytes_sent == 5


def test_collectives_of_sub_groups_keep_virtual_time() -> None:
    clock = VirtualClock(start=1e6)
    group = SimulatedBackend.create_group(3, clock=clock)
    sub = SubBackend(SubBackend(group[1], [1, 2]), [0, 1])
    call = Background(sub.barrier, timeout=30)
    clock.wait_for_sleepers(1)
    clock.advance(29)
    clock.wait_for_sleepers(1)
    assert not call.is_over
    clock.advance(1)
    with pytest.raises(OperationTimeoutError) as caught:
        call.result()
    assert caught.value.peer == 2
    for backend in group:
        backend.kill()


def test_a_sub_group_knows_which_of_its_ranks_share_a_host() -> None:
    group = SimulatedBackend.create_group(5, hosts=[0, 0, 2, 2, 0])
    assert group[0].group.hosts == (0, 0, 2, 2, 0)
    assert SubBackend(group[3], [1, 2, 3, 4]).group.hosts == (0, 1, 1, 0)
    assert SubBackend(SubBackend(group[3], [1, 2, 3, 4]), [0, 2]).group.hosts == (0, 1)
    run_ranks(group, lambda backend: backend.close())


def test_ranks_whose_hosts_are_not_known_have_one_each(group: list[SimulatedBackend]) -> None:
    assert group[0].group.hosts == (0, 1, 2, 3, 4)
