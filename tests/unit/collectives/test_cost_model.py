"""The cost model's formulas, and what AUTO makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ringfort import DistributedConfig, DistributedContext, SimulatedBackend
from ringfort.collectives import cost_model
from ringfort.collectives.algorithms import tree_links
from ringfort.collectives.cost_model import (
    BLOCK_BYTES,
    DOUBLING_BYTES,
    READY_BYTES,
    CostModel,
    check_strategy,
    settle,
    tree_depth,
)
from ringfort.collectives.link_costs import LinkCosts
from ringfort.config import (
    GIB,
    KIB,
    MIB,
    AllReduceStrategy,
    BroadcastStrategy,
    CollectiveConfig,
    ReduceStrategy,
    Shape,
    Strategy,
)
from ringfort.errors import ConfigError, InvalidArgumentError
from ringfort.testing.ranks import at_once
from ringfort.transport import fast_path

REDUCE, OVERHEAD = 0.25, 0.5


def unit(world_size: int, hosts: tuple[int, ...] | None = None, **changes: float) -> CostModel:
    """Unit latency and one byte a second, so that a prediction reads as "latencies + bytes moved"."""
    links = replace(LinkCosts.even(world_size, 1.0, 1.0), overhead=OVERHEAD, reducer=(REDUCE,) * 3, start=0.0)
    return CostModel(replace(links, **changes), hosts)


def lan(world_size: int) -> CostModel:
    return CostModel(LinkCosts.even(world_size, 200e-6, 110e6))


def two_hosts(ranks: int, slower: float) -> CostModel:
    """Half of the ranks on each of two hosts, whose links to each other cost so many times as much."""
    hosts = tuple(0 if rank < ranks // 2 else ranks // 2 for rank in range(ranks))
    far = np.where(np.not_equal.outer(np.array(hosts), np.array(hosts)), slower, 1.0)
    links = LinkCosts.even(ranks)
    return CostModel(replace(links, latency=links.latency * far, per_byte=links.per_byte * far), hosts)


@pytest.mark.parametrize(
    ("strategy", "world_size", "latencies", "moved", "reduced"),
    [
        (AllReduceStrategy.RING, 4, 6, 1.5, 0.75),
        (AllReduceStrategy.RING, 2, 2, 1.0, 0.5),
        (AllReduceStrategy.HALVING_DOUBLING, 8, 6, 1.75, 0.875),
        (AllReduceStrategy.HALVING_DOUBLING, 6, 4 + 2, 1.5 + 2, 0.75 + 1),
        (AllReduceStrategy.DIRECT, 4, 1 + 2 * OVERHEAD, 3, 3 + 2),
        (AllReduceStrategy.TREE, 7, 4 * (1 + OVERHEAD), 2 * 2 * 2, 2 * 2),
    ],
)
def test_an_all_reduce_costs_its_latencies_and_what_it_moves_and_reduces(
    strategy: AllReduceStrategy, world_size: int, latencies: float, moved: float, reduced: float
) -> None:
    for nbytes in (DOUBLING_BYTES + 1, min(BLOCK_BYTES, world_size * fast_path.LARGEST)):
        cost = unit(world_size).predict(strategy, nbytes)
        assert cost == pytest.approx(latencies + nbytes * (moved + REDUCE * reduced))


@pytest.mark.parametrize(("latency", "waiting"), [(1.0, 1), (3 * MIB, 3 * MIB + 5 * 2 * MIB)])
def test_a_ring_hides_the_way_of_a_slice_behind_the_bytes_of_the_one_before(latency: float, waiting: float) -> None:
    links = unit(4).links
    model = CostModel(replace(links, latency=links.latency * latency))
    cost = model.predict(AllReduceStrategy.RING, 4 * MIB)  # a slice of it takes MIB seconds
    assert cost == pytest.approx(waiting + 3 * MIB * (2 + REDUCE))


@pytest.mark.parametrize(("world_size", "latencies", "moved", "reduced"), [(8, 3, 3, 9), (6, 2 + 2, 2 + 2, 6 + 1)])
def test_halving_doubling_of_little_only_doubles(
    world_size: int, latencies: float, moved: float, reduced: float
) -> None:
    cost = unit(world_size).predict(AllReduceStrategy.HALVING_DOUBLING, 1000)
    assert cost == pytest.approx(latencies + 1000 * (moved + REDUCE * reduced))


def test_hosts_cost_what_is_moved_inside_and_a_ring_between_them() -> None:
    nbytes = MIB
    cost = unit(6, (0, 0, 0, 3, 3, 3)).predict(AllReduceStrategy.HIERARCHICAL, nbytes)
    inside, between = 2 * (2 + nbytes / 3 * (2 + REDUCE)), 2 + nbytes / 3 / 2 * (2 + REDUCE)
    assert cost == pytest.approx(inside + between)


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    model = unit(4)
    model.links.latency[2, 3] = 7.0
    assert model.predict(AllReduceStrategy.RING, 0) == 6 * 7.0


def test_a_call_costs_something_beside_its_messages_whatever_its_strategy() -> None:
    for strategy in unit(4).candidates(AllReduceStrategy):
        plain, started = (unit(4, start=start).predict(strategy, 1000) for start in (0.0, 3.0))
        assert started == pytest.approx(plain + 3)
        assert unit(1, start=3.0).predict(strategy, 1000) == 0


ONE_HOST = (0, 0, 0, 0)


def test_where_ranks_share_cores_arithmetic_of_all_takes_as_many_times_as_long() -> None:
    nbytes = MIB
    for strategy, reduced in ((AllReduceStrategy.RING, 0.75), (AllReduceStrategy.HALVING_DOUBLING, 0.75)):
        alone, crowded = (unit(4, ONE_HOST, crowd=crowd).predict(strategy, nbytes) for crowd in (1.0, 2.0))
        # What the messages cost is measured with all ranks at the cores, and holds them already.
        assert crowded - alone == pytest.approx(reduced * nbytes * REDUCE)


def test_a_tree_takes_no_less_than_its_messages_take_the_cores() -> None:
    nbytes = 8 * BLOCK_BYTES
    crowded = unit(4, ONE_HOST, crowd=4.0, overhead=0.0)
    least = 3 / 4 * (8 + nbytes)  # a tree's three messages of each block beside the four of an exchange of all
    assert crowded.predict(BroadcastStrategy.RING, nbytes) == pytest.approx(least)


def test_a_message_one_way_is_half_of_an_exchange_for_the_cores_of_a_host() -> None:
    apart, together = (unit(2, hosts).predict(BroadcastStrategy.RING, BLOCK_BYTES) for hosts in (None, (0, 0)))
    assert apart - together == pytest.approx(BLOCK_BYTES / 2)


def test_where_ranks_share_cores_every_direct_message_takes_its_time() -> None:
    alone, crowded = (unit(4, ONE_HOST, crowd=crowd).predict(AllReduceStrategy.DIRECT, 0) for crowd in (1.0, 2.0))
    assert (alone, crowded) == (1 + 2 * OVERHEAD, 3)


def test_the_wire_between_hosts_is_no_quicker_for_idle_cores() -> None:
    hosts, nbytes = (0, 0, 2, 2), 64 * BLOCK_BYTES
    apart = [unit(4, hosts, crowd=crowd, overhead=0.0).predict(BroadcastStrategy.RING, nbytes) for crowd in (1.0, 2.0)]
    assert apart[0] == pytest.approx(apart[1], rel=1e-3)


def test_hosts_far_apart_are_crossed_by_one_ring_of_hosts() -> None:
    assert two_hosts(8, 20).choose(AllReduceStrategy, 64 * MIB) == AllReduceStrategy.HIERARCHICAL
    assert two_hosts(8, 1).choose(AllReduceStrategy, 64 * MIB) != AllReduceStrategy.HIERARCHICAL


@pytest.mark.parametrize("kind", [ReduceStrategy, BroadcastStrategy])
def test_a_reduce_and_a_broadcast_enter_hosts_far_apart_once(kind: type[Strategy]) -> None:
    for nbytes in (4 * KIB, 64 * MIB):
        assert two_hosts(8, 20).choose(kind, nbytes) == kind(Shape.HIERARCHICAL)
    assert kind(Shape.HIERARCHICAL) not in lan(4).candidates(kind), "hosts of one rank each are no hosts"


@pytest.mark.parametrize(
    ("nbytes", "hops", "moved"), [(1000, 1 + 1, 1 + 2 / 2), (4 * BLOCK_BYTES, 1 + 4, (1 + 4 / 2 + 3) / 4)]
)
def test_a_tree_over_hosts_costs_its_hops_between_and_inside(nbytes: int, hops: int, moved: float) -> None:
    model = CostModel(replace(LinkCosts.even(6, 1.0, 1.0), overhead=0.0), (0, 0, 0, 3, 3, 3))
    cost = model.predict(BroadcastStrategy.HIERARCHICAL, nbytes)
    assert cost == pytest.approx(hops + nbytes * moved, rel=1e-6)


def test_a_pipelined_tree_moves_large_data_in_the_time_of_its_widest_node() -> None:
    model = CostModel(LinkCosts.even(33, 1e-9, 1.0))
    nbytes = 1000 * BLOCK_BYTES
    assert model.predict(BroadcastStrategy.RING, nbytes) == pytest.approx(nbytes, rel=0.05)
    assert model.predict(BroadcastStrategy.tree(3), nbytes) == pytest.approx(3 * nbytes, rel=0.05)
    assert model.predict(BroadcastStrategy.DIRECT, nbytes) == pytest.approx(32 * nbytes, rel=0.05)


def test_a_message_that_travels_alone_is_quicker_down_a_tree() -> None:
    assert unit(8, hop=0.5).predict(BroadcastStrategy.RING, 0) == pytest.approx(7 * 0.5)


def test_a_node_pays_only_for_the_children_it_has() -> None:
    model = unit(2)
    assert model.predict(BroadcastStrategy.tree(8), 1000) == model.predict(BroadcastStrategy.RING, 1000)


def test_a_reduce_costs_more_than_a_broadcast_by_what_it_reduces() -> None:
    model = unit(2)
    down, up = model.predict(BroadcastStrategy.RING, 1000), model.predict(ReduceStrategy.RING, 1000)
    assert up - down == pytest.approx(1000 * REDUCE)


def test_types_that_are_added_slowly_cost_more_where_more_is_added() -> None:
    links = LinkCosts.even(2)
    slow = CostModel(replace(links, reducer=(0.0, links.reducer[1], 1.0)))
    assert slow.predict(AllReduceStrategy.RING, 100, "float16") == pytest.approx(
        slow.predict(AllReduceStrategy.RING, 100, "int32") + 50
    )


@given(st.integers(1, 300), st.integers(1, 20))
def test_the_depth_of_a_tree_is_that_of_its_links(world_size: int, arity: int) -> None:
    depth, node = 0, tree_links(world_size - 1, world_size, 0, arity)[0]
    while node is not None:
        depth, node = depth + 1, tree_links(node, world_size, 0, arity)[0]
    assert tree_depth(world_size, arity) == depth


@pytest.mark.parametrize(
    ("model", "nbytes", "expected"),
    [
        (CostModel(LinkCosts.even(2)), 4, AllReduceStrategy.DIRECT),
        (CostModel(LinkCosts.even(2)), BLOCK_BYTES, AllReduceStrategy.DIRECT),
        (CostModel(LinkCosts.even(2)), BLOCK_BYTES + 4, AllReduceStrategy.HALVING_DOUBLING),
        (CostModel(LinkCosts.even(2)), READY_BYTES, AllReduceStrategy.HALVING_DOUBLING),
        (CostModel(LinkCosts.even(2)), READY_BYTES + 4, AllReduceStrategy.RING),
        (CostModel(LinkCosts.even(3)), 4, AllReduceStrategy.DIRECT),
        (CostModel(LinkCosts.even(4)), 4, AllReduceStrategy.HALVING_DOUBLING),
        (CostModel(LinkCosts.even(4)), READY_BYTES, AllReduceStrategy.HALVING_DOUBLING),
        (CostModel(LinkCosts.even(2)), 64 * MIB, AllReduceStrategy.RING),
        (CostModel(LinkCosts.even(3)), 64 * MIB, AllReduceStrategy.RING),
        (CostModel(LinkCosts.even(4)), READY_BYTES + 4, AllReduceStrategy.RING),
        (CostModel(LinkCosts.even(64)), 256 * KIB, AllReduceStrategy.HALVING_DOUBLING),
        (CostModel(LinkCosts.even(64)), 64 * MIB, AllReduceStrategy.RING),
        (lan(6), GIB, AllReduceStrategy.RING),
        (lan(6), 4, AllReduceStrategy.DIRECT),
        (lan(64), 64 * KIB, AllReduceStrategy.HALVING_DOUBLING),
    ],
)
def test_auto_goes_direct_with_little_and_round_with_much(
    model: CostModel, nbytes: int, expected: AllReduceStrategy
) -> None:
    assert model.choose(AllReduceStrategy, nbytes) == expected


def test_of_several_ranks_a_host_not_all_send_all_between_the_hosts() -> None:
    assert two_hosts(4, 20).choose(AllReduceStrategy, READY_BYTES) == AllReduceStrategy.HIERARCHICAL


def test_two_ranks_weigh_no_tree() -> None:
    assert "tree" not in " ".join(map(str, lan(2).candidates(AllReduceStrategy)))
    assert BroadcastStrategy.tree(2) in lan(2).candidates(BroadcastStrategy)


def test_a_wide_world_with_little_to_say_uses_no_direct_messages() -> None:
    assert lan(200).choose(AllReduceStrategy, 4) != AllReduceStrategy.DIRECT


def test_a_rooted_collective_goes_direct_with_little_and_down_a_chain_with_much() -> None:
    for kind in (BroadcastStrategy, ReduceStrategy):
        assert lan(4).choose(kind, 4) == kind.DIRECT
        assert lan(4).choose(kind, GIB) == kind.RING
        assert str(lan(64).choose(kind, 4)).startswith("tree")


@given(st.integers(1, 60), st.integers(0, 2**40), st.floats(1e-7, 1.0), st.floats(1e3, 1e12))
def test_auto_takes_the_cheapest_candidate(world_size: int, nbytes: int, latency: float, bandwidth: float) -> None:
    model = CostModel(LinkCosts.even(world_size, latency, bandwidth))
    kinds: list[type[Strategy]] = [AllReduceStrategy, ReduceStrategy, BroadcastStrategy]
    for kind in kinds:
        chosen = model.choose(kind, nbytes)
        assert type(chosen) is kind
        cost = model.predict(chosen, nbytes)
        is_kept_ready = kind is AllReduceStrategy and nbytes <= READY_BYTES and world_size & (world_size - 1) == 0
        if is_kept_ready:
            assert chosen in (AllReduceStrategy.HALVING_DOUBLING, AllReduceStrategy.DIRECT)
        else:
            assert cost == min(model.predict(strategy, nbytes) for strategy in model.candidates(kind))
        assert cost >= 0
        assert model.choose(kind, nbytes) is chosen


def test_a_strategy_that_was_asked_for_or_configured_is_taken_as_it_is() -> None:
    config = DistributedConfig(collective=CollectiveConfig(reduce=ReduceStrategy.RING))
    backend = SimulatedBackend.create_group(1, config=config)[0]
    assert settle(backend.group, AllReduceStrategy.tree(7), 4) == AllReduceStrategy.tree(7)
    assert check_strategy(ReduceStrategy.AUTO, config.collective.reduce) == ReduceStrategy.RING
    assert check_strategy(None, config.collective.reduce) == ReduceStrategy.RING
    assert check_strategy(ReduceStrategy.TREE, config.collective.reduce) == ReduceStrategy.TREE
    assert settle(backend.group, ReduceStrategy.tree(3), 4) == ReduceStrategy.tree(3)
    assert settle(backend.group, BroadcastStrategy.AUTO, 4) != BroadcastStrategy.AUTO
    backend.close()


def test_a_simulated_group_chooses_without_sending_a_word() -> None:
    group = SimulatedBackend.create_group(3)
    assert not any(cost_model.needs_measuring(backend.group) for backend in group)
    assert {str(settle(backend.group, AllReduceStrategy.AUTO, MIB)) for backend in group} == {"ring"}
    assert all(backend.traffic().messages_sent == 0 for backend in group)
    at_once(*(DistributedContext(backend).close for backend in group))


def test_what_cannot_be_predicted_is_refused_by_name_and_value() -> None:
    with pytest.raises(InvalidArgumentError, match="strategy='auto'"):
        unit(4).predict(AllReduceStrategy.AUTO, 1)
    with pytest.raises(InvalidArgumentError, match="nbytes=-1"):
        unit(2).predict(ReduceStrategy.RING, -1)
    with pytest.raises(ConfigError, match="bandwidth=0"):
        CollectiveConfig(bandwidth=0.0)
