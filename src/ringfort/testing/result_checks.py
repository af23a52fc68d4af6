"""Rules of what collectives return: equal to NumPy's result, with the same bits at every rank, also if compressed."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from ringfort.collectives.ops import ReduceOp
from ringfort.compression.compressor import GradientCompressor
from ringfort.config import AllReduceStrategy, BroadcastStrategy, ReduceStrategy
from ringfort.context import DistributedContext
from ringfort.errors import NonFiniteError
from ringfort.testing.check import collective_check, raises
from ringfort.testing.reference import (
    DTYPES,
    SHAPES,
    Array,
    assert_equal,
    assert_same_everywhere,
    meaningful,
    op_of,
    part_of,
    parts_of,
    reduced,
)

EVERY = ("ring", "tree", "tree(3)", "direct", "hierarchical")
ALL_REDUCE = (None, *map(AllReduceStrategy.parse, (*EVERY, "halving_doubling")))
REDUCE = (None, *map(ReduceStrategy.parse, EVERY))
BROADCAST = (None, *map(BroadcastStrategy.parse, EVERY))
COMPRESSION = ("int8", "onebit", "topk(0.05)+int4", "randomk(0.1)", "powersgd(2)", "auto")
COMPRESSED_SHAPES = ((90, 40), (70_003,))
COUNTS = (0, 1, 2, 5, 1001, 140_003)
"""Elements: from fewer than there are ranks to more than one block of a pipeline."""
ROOTED_COUNTS = (0, 1, 1001, 70_001)
"""The same for collectives with a root, which is each rank in turn."""


@collective_check(ranks=3)
def all_reduce_is_the_reduction_of_all_for_every_op_and_element_type(context: DistributedContext) -> None:
    for dtype, op in meaningful():
        parts, x = parts_of(context, (11,), dtype)
        assert context.all_reduce(x, op_of(op, context.rank)) is x
        assert_equal(x, reduced(parts, op), f"{op.name} of {dtype}")


@collective_check(ranks=3)
def all_reduce_into_another_array_keeps_what_it_was_given(context: DistributedContext) -> None:
    for op, count in product((ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX), (*COUNTS, 1_500_000)):
        parts, x = parts_of(context, (count,), "float32")
        kept, out = x.copy(), np.full(count, -1, np.float32)
        # Ranks may differ in it: it is nobody else's business where a rank wants its result.
        found = context.all_reduce(x, op, out=None if context.rank == 1 else out)
        assert found is (x if context.rank == 1 else out)
        assert_equal(found, reduced(parts, op), f"{op.name} of {count}")
        assert context.rank == 1 or np.array_equal(x, kept)


def _all_reduce_with_every_strategy(context: DistributedContext) -> None:
    n = context.world_size
    for strategy, count in product(ALL_REDUCE, COUNTS):
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
    op = ReduceOp.PREMUL_SUM
    for strategy, root, count in product(REDUCE, range(4), ROOTED_COUNTS):
        parts, x = parts_of(context, (count,), "int32", seed=root)
        assert context.reduce(x, root, op_of(op, context.rank), strategy=strategy) is x
        expected = reduced(parts, op) if context.rank == root else parts[context.rank]
        assert_equal(x, expected, f"{strategy} of {count} to {root}")


@collective_check(ranks=3)
def reduce_works_for_every_op_and_element_type(context: DistributedContext) -> None:
    for turn, (dtype, op) in enumerate(meaningful()):
        parts, x = parts_of(context, (5,), dtype)
        context.reduce(x, turn % 3, op_of(op, context.rank))
        expected = reduced(parts, op) if context.rank == turn % 3 else parts[context.rank]
        assert_equal(x, expected, f"{op.name} of {dtype}")


@collective_check(ranks=3)
def reduce_scatter_gives_each_rank_its_reduced_part(context: DistributedContext) -> None:
    for dtype, op in meaningful():
        parts, x = parts_of(context, (3, 5), dtype)
        result = context.reduce_scatter(x, op_of(op, context.rank))
        assert_equal(result, reduced(parts, op)[context.rank], f"{op.name} of {dtype}")
        assert_equal(x, parts[context.rank], "what was passed is kept")
    for shape in ((3,), (3, 0), (3, 100_003), (3, 2, 2)):
        parts, x = parts_of(context, shape, "float64")
        assert_equal(np.asarray(context.reduce_scatter(x)), reduced(parts)[context.rank], f"{shape}")


# --- transfers ---


@collective_check(ranks=4)
def broadcast_gives_everybody_the_roots_array(context: DistributedContext) -> None:
    for strategy, root, count in product(BROADCAST, range(4), ROOTED_COUNTS):
        parts, x = parts_of(context, (count,), "int32", seed=root)
        assert context.broadcast(x, root, strategy=strategy) is x
        assert_equal(x, parts[root], f"{strategy} of {count} from {root}")


@collective_check(ranks=3)
def gathers_stack_what_the_ranks_have(context: DistributedContext) -> None:
    for dtype, (turn, shape) in product(DTYPES, enumerate(SHAPES)):
        parts, x = parts_of(context, shape, dtype)
        assert_equal(context.all_gather(x), np.stack(parts), f"all_gather of {dtype}{shape}")
        gathered = context.gather(x, turn % 3)
        if context.rank == turn % 3:
            assert_equal(gathered, np.stack(parts), f"gather of {dtype}{shape}")
        else:
            assert gathered is None
        assert_equal(x, parts[context.rank], "what was passed is kept")


@collective_check(ranks=3)
def scatter_gives_each_rank_its_part(context: DistributedContext) -> None:
    for dtype, (turn, shape) in product(DTYPES, enumerate(SHAPES)):
        root = turn % 3
        whole = part_of(root, (3, *shape), dtype).astype(dtype)
        part = context.scatter(whole if context.rank == root else None, root)
        assert_equal(np.asarray(part), whole[context.rank : context.rank + 1].reshape(shape), f"{dtype}{shape}")


@collective_check(ranks=3)
def all_to_all_turns_rows_into_columns(context: DistributedContext) -> None:
    for dtype, shape in product(("bool", "uint8", "float16", "float64", "complex64"), (*SHAPES, (100_003,))):
        parts, x = parts_of(context, (3, *shape), dtype)
        assert_equal(context.all_to_all(x), np.stack([part[context.rank] for part in parts]), f"{dtype}{shape}")


@collective_check(ranks=3)
def all_to_all_takes_parts_of_any_shapes_and_types(context: DistributedContext) -> None:

    def part(src: int, dst: int) -> Array:
        shape = ((), (0,), (src + 1, dst + 2), (70_001,))[(src + 2 * dst) % 4]
        return part_of(src, shape, ("float32", "bool", "int64")[(src + dst) % 3], seed=dst)

    result = context.all_to_all([part(context.rank, dst) for dst in range(3)])
    assert isinstance(result, list)
    for src, got in enumerate(result):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        assert_equal(got, part(src, context.rank), f"from {src}")


@collective_check(ranks=3)
def arrays_go_between_two_ranks(context: DistributedContext) -> None:
    n, rank = 3, context.rank
    for dtype, shape in product(DTYPES, SHAPES):
        parts, x = parts_of(context, shape, dtype)
        into = np.zeros(shape, dtype)
        assert context.sendrecv(x, (rank + 1) % n, into, (rank - 1) % n, tag=5) is into
        assert_equal(into, parts[(rank - 1) % n], f"sendrecv of {dtype}{shape}")
    parts, x = parts_of(context, (6, 4), "float32")
    if rank == 0:
        context.send(x[:, ::2], 1, tag=3)
    elif rank == 1:
        into = np.zeros((4, 6), np.float32)
        assert context.recv(into[::2].T, 0, tag=3) is not None
        assert_equal(into[::2].T.reshape(6, 2), parts[0][:, ::2], "a transposed target")
    context.barrier()


@collective_check(ranks=3)
def objects_are_the_same_everywhere(context: DistributedContext) -> None:
    for root in range(3):
        array = part_of(root, (2, 3), "float32")
        plain: list[Any] = [root, {"list": [1, 2.5, None, True, "naïve"], "bytes": b"\0\xff", "dict": {"a": {}}}]
        got = context.broadcast_object({"plain": plain, "array": array} if context.rank == root else None, root)
        assert got["plain"] == plain
        assert_equal(got["array"], array, "array")
    gathered = context.all_gather_object(["rank", context.rank, "x" * 70_000 * context.rank])
    assert gathered == [["rank", rank, "x" * 70_000 * rank] for rank in range(3)]


# --- compression ---


@collective_check(ranks=3)
def a_compressed_all_reduce_ends_with_the_same_bits_and_loses_nothing(context: DistributedContext) -> None:
    for name in COMPRESSION:
        compressor = GradientCompressor(name)
        for shape in COMPRESSED_SHAPES:
            given, got = np.zeros(shape), np.zeros(shape)
            for step in range(2):
                parts = [np.random.default_rng([rank, step]).normal(size=shape).astype(np.float32) for rank in range(3)]
                x = parts[context.rank]
                given += np.sum(parts, axis=0, dtype=np.float64)
                context.all_reduce(x, compression=compressor, name=str(shape))
                assert_same_everywhere(context.backend, x, f"{name} of {shape}")
                got += x
            residual = compressor.residual(str(shape))
            kept = np.zeros(shape) if residual is None else residual.reshape(shape).astype(np.float64)
            context.all_reduce(kept)
            assert np.allclose(got + kept, given, rtol=1e-4, atol=1e-3), f"{name} of {shape}"


@collective_check(ranks=3)
def a_nan_that_was_to_be_compressed_is_an_error_at_every_rank(context: DistributedContext) -> None:
    for name in ("int8", "topk(0.05)", "randomk(0.1)", "powersgd(2)"):
        x = np.ones((90, 40), np.float32)
        if context.rank == 2:
            x[1, 1] = np.nan
        with raises(NonFiniteError, saying="1 at rank 2"):
            context.all_reduce(x, ReduceOp.MEAN, compression=name)
    x = np.ones(5, np.float32)
    context.all_reduce(x)  # the group is still usable
    assert (x == 3).all()
