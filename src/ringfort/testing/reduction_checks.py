"""Rules of reductions: equal to NumPy's result, with the same bits at every rank."""

from __future__ import annotations

import numpy as np

from ringfort.collectives.ops import ReduceOp
from ringfort.config import AllReduceStrategy, ReduceStrategy
from ringfort.context import DistributedContext
from ringfort.testing.check import collective_check
from ringfort.testing.reference import assert_equal, assert_same_everywhere, meaningful, op_of, parts_of, reduced

ALL_REDUCE = (
    None,
    AllReduceStrategy.RING,
    AllReduceStrategy.TREE,
    AllReduceStrategy.tree(3),
    AllReduceStrategy.DIRECT,
    AllReduceStrategy.HALVING_DOUBLING,
    AllReduceStrategy.HIERARCHICAL,
)
REDUCE = (
    None,
    ReduceStrategy.RING,
    ReduceStrategy.TREE,
    ReduceStrategy.tree(3),
    ReduceStrategy.DIRECT,
    ReduceStrategy.HIERARCHICAL,
)

COUNTS = (0, 1, 2, 5, 1001, 140_003)
"""Elements: from fewer than there are ranks to more than one block of a pipeline."""


@collective_check(ranks=3)
def all_reduce_is_the_reduction_of_all_for_every_op_and_element_type(context: DistributedContext) -> None:
    for dtype, op in meaningful():
        parts = parts_of(3, (11,), dtype)
        x = parts[context.rank].copy()
        result = context.all_reduce(x, op_of(op, context.rank))
        assert result is x
        assert_equal(x, reduced(parts, op_of(op, 0)), f"{op.name} of {dtype}")


def _all_reduce_with_every_strategy(context: DistributedContext) -> None:
    n = context.world_size
    for strategy in ALL_REDUCE:
        for count in COUNTS:
            what = f"{strategy} of {count}"
            parts = [np.random.default_rng([rank, count]).normal(size=count).astype(np.float32) for rank in range(n)]
            x = parts[context.rank].copy()
            context.all_reduce(x, strategy=strategy)
            assert np.allclose(x, np.sum(parts, axis=0), rtol=1e-5, atol=1e-5), what
            assert_same_everywhere(context.backend, x, what)


@collective_check(ranks=2)
def all_reduce_gives_two_ranks_the_same_bits_by_every_strategy(context: DistributedContext) -> None:
    _all_reduce_with_every_strategy(context)


@collective_check(ranks=3)
def all_reduce_gives_three_ranks_the_same_bits_by_every_strategy(context: DistributedContext) -> None:
    _all_reduce_with_every_strategy(context)


@collective_check(ranks=4)
def all_reduce_gives_four_ranks_the_same_bits_by_every_strategy(context: DistributedContext) -> None:
    _all_reduce_with_every_strategy(context)


@collective_check(ranks=4)
def reduce_gives_the_root_the_reduction_and_leaves_the_others_theirs(context: DistributedContext) -> None:
    for strategy in REDUCE:
        for root in range(4):
            for count in (0, 1, 1001, 70_001):
                parts = parts_of(4, (count,), "int32", seed=root)
                x = parts[context.rank].copy()
                result = context.reduce(x, root, op_of(ReduceOp.PREMUL_SUM, context.rank), strategy=strategy)
                assert result is x
                expected = reduced(parts, ReduceOp.premul_sum(1)) if context.rank == root else parts[context.rank]
                assert_equal(x, expected, f"{strategy} of {count} to {root}")


@collective_check(ranks=3)
def reduce_works_for_every_op_and_element_type(context: DistributedContext) -> None:
    for turn, (dtype, op) in enumerate(meaningful()):
        parts = parts_of(3, (5,), dtype)
        x = parts[context.rank].copy()
        context.reduce(x, turn % 3, op_of(op, context.rank))
        expected = reduced(parts, op_of(op, 0)) if context.rank == turn % 3 else parts[context.rank]
        assert_equal(x, expected, f"{op.name} of {dtype}")


@collective_check(ranks=3)
def reduce_scatter_gives_each_rank_its_reduced_part(context: DistributedContext) -> None:
    for dtype, op in meaningful():
        parts = parts_of(3, (3, 5), dtype)
        x = parts[context.rank].copy()
        result = context.reduce_scatter(x, op_of(op, context.rank))
        assert_equal(result, reduced(parts, op_of(op, 0))[context.rank], f"{op.name} of {dtype}")
        assert_equal(x, parts[context.rank], "what was passed is kept")
    for shape in ((3,), (3, 0), (3, 100_003), (3, 2, 2)):
        parts = parts_of(3, shape, "float64")
        result = context.reduce_scatter(parts[context.rank])
        assert_equal(np.asarray(result), reduced(parts, ReduceOp.SUM)[context.rank], f"{shape}")
