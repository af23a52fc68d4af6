"""The cost model's formulas, and what AUTO makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfort.collectives.auto import (
    BLOCK_BYTES,
    DOUBLING_BYTES,
    FOLD,
    OVERHEAD,
    TREE_ARITIES,
    CostModel,
    choose_all_reduce,
    choose_broadcast,
    choose_reduce,
    tree_depth,
)
from ringfort.collectives.plan import tree_links
from ringfort.config import (
    GIB,
    KIB,
    MIB,
    AllReduceStrategy,
    BroadcastStrategy,
    CollectiveConfig,
    ReduceStrategy,
    Shape,
)
from ringfort.errors import ConfigError, InvalidArgumentError, InvalidWorldSizeError

# Unit latency and one byte a second, so that a prediction reads as "latencies + bytes moved".
MODEL = CostModel(latency=1.0, bandwidth=1.0)
LAN = CollectiveConfig(latency=200e-6, bandwidth=110e6)


@pytest.mark.parametrize(
    ("shape", "world_size", "latencies", "moved", "folded"),
    [
        (Shape.RING, 4, 6, 1.5, 0.75),
        (Shape.RING, 2, 2, 1.0, 0.5),
        (Shape.HALVING_DOUBLING, 8, 6, 1.75, 0.875),
        (Shape.HALVING_DOUBLING, 6, 4 + 2, 1.5 + 2, 0.75 + 1),
        (Shape.DIRECT, 4, 1 + 2 * OVERHEAD, 3, 3),
        (Shape.TREE, 7, 4 * (1 + OVERHEAD), 2 * 2 * 2, 2 * 2),
    ],
)
def test_an_all_reduce_costs_its_latencies_and_what_it_moves_and_folds(
    shape: Shape, world_size: int, latencies: float, moved: float, folded: float
) -> None:
    for nbytes in (DOUBLING_BYTES + 1, BLOCK_BYTES):
        assert MODEL.predict(shape, world_size, nbytes) == pytest.approx(latencies + nbytes * (moved + FOLD * folded))


@pytest.mark.parametrize(("world_size", "latencies", "moved", "folded"), [(8, 3, 3, 3), (6, 2 + 2, 2 + 2, 2 + 1)])
def test_halving_doubling_of_little_only_doubles(
    world_size: int, latencies: float, moved: float, folded: float
) -> None:
    cost = MODEL.predict(Shape.HALVING_DOUBLING, world_size, 1000)
    assert cost == pytest.approx(latencies + 1000 * (moved + FOLD * folded))


def test_a_pipelined_tree_moves_large_data_in_the_time_of_its_widest_node() -> None:
    model = CostModel(latency=1e-9, bandwidth=1.0)
    nbytes = 1000 * BLOCK_BYTES
    assert model.predict_broadcast(Shape.RING, 33, nbytes) == pytest.approx(nbytes, rel=0.05)
    assert model.predict_broadcast(Shape.TREE, 33, nbytes, 3) == pytest.approx(3 * nbytes, rel=0.05)
    assert model.predict_broadcast(Shape.DIRECT, 33, nbytes) == pytest.approx(32 * nbytes, rel=0.05)


def test_a_node_pays_only_for_the_children_it_has() -> None:
    assert MODEL.predict_broadcast(Shape.TREE, 2, 1000, 8) == MODEL.predict_broadcast(Shape.RING, 2, 1000)


def test_a_reduce_costs_more_than_a_broadcast_by_what_it_folds() -> None:
    down, up = (predict(Shape.RING, 2, 1000) for predict in (MODEL.predict_broadcast, MODEL.predict_reduce))
    assert up - down == pytest.approx(1000 * FOLD)


@given(st.integers(1, 300), st.integers(1, 20))
def test_the_depth_of_a_tree_is_that_of_its_links(world_size: int, arity: int) -> None:
    depth, node = 0, tree_links(world_size - 1, world_size, 0, arity)[0]
    while node is not None:
        depth, node = depth + 1, tree_links(node, world_size, 0, arity)[0]
    assert tree_depth(world_size, arity) == depth


@pytest.mark.parametrize(
    ("config", "world_size", "nbytes", "expected"),
    [
        (CollectiveConfig(), 2, 4, AllReduceStrategy.DIRECT),
        (CollectiveConfig(), 3, 4, AllReduceStrategy.DIRECT),
        (CollectiveConfig(), 4, 4, AllReduceStrategy.HALVING_DOUBLING),
        (CollectiveConfig(), 2, 64 * MIB, AllReduceStrategy.RING),
        (CollectiveConfig(), 3, 64 * MIB, AllReduceStrategy.RING),
        (CollectiveConfig(), 4, 64 * MIB, AllReduceStrategy.HALVING_DOUBLING),
        (LAN, 6, GIB, AllReduceStrategy.RING),
        (LAN, 6, 4, AllReduceStrategy.DIRECT),
        (LAN, 64, 64 * KIB, AllReduceStrategy.HALVING_DOUBLING),
    ],
)
def test_auto_goes_direct_with_little_and_round_with_much(
    config: CollectiveConfig, world_size: int, nbytes: int, expected: AllReduceStrategy
) -> None:
    assert choose_all_reduce(config, world_size, nbytes) == expected


def test_a_wide_world_with_little_to_say_uses_no_direct_messages() -> None:
    assert choose_all_reduce(LAN, 200, 4).shape is not Shape.DIRECT


def test_a_rooted_collective_goes_direct_with_little_and_down_a_chain_with_much() -> None:
    assert choose_broadcast(LAN, 4, 4) == BroadcastStrategy.DIRECT
    assert choose_broadcast(LAN, 4, GIB) == BroadcastStrategy.RING
    assert choose_broadcast(LAN, 64, 4).shape is Shape.TREE
    assert choose_reduce(LAN, 4, 4) == ReduceStrategy.DIRECT
    assert choose_reduce(LAN, 4, GIB) == ReduceStrategy.RING
    assert choose_reduce(LAN, 64, 4).shape is Shape.TREE


@given(
    st.integers(1, 500), st.integers(0, 2**40), st.floats(1e-7, 1.0), st.floats(1e3, 1e12), st.sampled_from([2, 3, 9])
)
def test_auto_takes_the_cheapest_candidate(
    world_size: int, nbytes: int, latency: float, bandwidth: float, other_arity: int
) -> None:
    config = CollectiveConfig(latency=latency, bandwidth=bandwidth)
    model = CostModel(latency, bandwidth)
    rooted = [(Shape.RING, 2), (Shape.DIRECT, 2), *((Shape.TREE, arity) for arity in TREE_ARITIES)]
    every = [*rooted, (Shape.HALVING_DOUBLING, 2)]
    for choose, predict, candidates in (
        (choose_all_reduce, model.predict, every),
        (choose_reduce, model.predict_reduce, rooted),
        (choose_broadcast, model.predict_broadcast, rooted),
    ):
        chosen = choose(config, world_size, nbytes)
        cost = predict(chosen.shape, world_size, nbytes, chosen.arity)
        assert cost == min(predict(shape, world_size, nbytes, arity) for shape, arity in candidates)
        assert cost >= 0


def test_a_strategy_that_was_configured_is_taken_as_it_is() -> None:
    config = CollectiveConfig(
        all_reduce=AllReduceStrategy.tree(7), reduce=ReduceStrategy.RING, broadcast=BroadcastStrategy.tree(3)
    )
    assert choose_all_reduce(config, 2, 4) == AllReduceStrategy.tree(7)
    assert choose_reduce(config, 2, 4) == ReduceStrategy.RING
    assert choose_broadcast(config, 2, 4) == BroadcastStrategy.tree(3)


def test_each_choice_is_a_strategy_of_its_own_kind() -> None:
    for nbytes in (4, GIB):
        assert type(choose_all_reduce(LAN, 8, nbytes)) is AllReduceStrategy
        assert type(choose_reduce(LAN, 8, nbytes)) is ReduceStrategy
        assert type(choose_broadcast(LAN, 8, nbytes)) is BroadcastStrategy


def test_what_cannot_be_predicted_is_refused_by_name_and_value() -> None:
    with pytest.raises(InvalidArgumentError, match=r"shape=.*AUTO"):
        MODEL.predict(Shape.AUTO, 4, 1)
    with pytest.raises(InvalidArgumentError, match=r"shape=.*HALVING_DOUBLING"):
        MODEL.predict_broadcast(Shape.HALVING_DOUBLING, 4, 1)
    with pytest.raises(InvalidWorldSizeError, match="world_size=0"):
        MODEL.predict(Shape.RING, 0, 1)
    with pytest.raises(InvalidArgumentError, match="nbytes=-1"):
        MODEL.predict_reduce(Shape.RING, 2, -1)
    with pytest.raises(ConfigError, match="bandwidth=0"):
        CostModel(1.0, 0.0)
