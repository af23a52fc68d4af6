"""Rules of the collectives' results: equal to a NumPy reference, and the same bits at every rank."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import reduce as left_fold
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from ringfort.backends.base import Backend, Traffic
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.config import AllReduceStrategy, BroadcastStrategy, ReduceStrategy
from ringfort.context import DistributedContext
from ringfort.errors import (
    DistributedError,
    InvalidArgumentError,
    InvalidRankError,
    OperationTimeoutError,
    UnsupportedArrayError,
    UnsupportedOpError,
)
from ringfort.testing.check import check, raises
from ringfort.testing.ranks import at_once

Array = npt.NDArray[Any]

INTEGERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
FLOATS = "float16 float32 float64".split()
COMPLEX = "complex64 complex128".split()

UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (0,), (3, 0, 2), (2, 3, 4))

ALL_REDUCE = (
    None,
    AllReduceStrategy.RING,
    AllReduceStrategy.TREE,
    AllReduceStrategy.tree(3),
    AllReduceStrategy.DIRECT,
    AllReduceStrategy.HALVING_DOUBLING,
)
REDUCE = (None, ReduceStrategy.RING, ReduceStrategy.TREE, ReduceStrategy.tree(3), ReduceStrategy.DIRECT)
BROADCAST = (None, BroadcastStrategy.RING, BroadcastStrategy.TREE, BroadcastStrategy.tree(3), BroadcastStrategy.DIRECT)

COUNTS = (0, 1, 2, 5, 1001, 300_007)
"""Elements: fewer than ranks, and more than one block of a pipeline."""


def part_of(rank: int, shape: tuple[int, ...], dtype: str, *, seed: int = 0) -> Array:
    """What `rank` contributes: numbers so small that every order of adding them gives the same."""
    numbers = np.random.default_rng([rank, seed]).integers(0, 4, shape)
    if dtype == "bool":
        return np.asarray(numbers > 1)
    array = np.asarray(numbers, dtype)
    return array + array[..., ::-1] * 1j if array.ndim and np.dtype(dtype).kind == "c" else array


def parts_of(n: int, shape: tuple[int, ...], dtype: str, *, seed: int = 0) -> list[Array]:
    """What all ranks contribute."""
    return [part_of(rank, shape, dtype, seed=seed).astype(dtype) for rank in range(n)]


def reduced(parts: Sequence[Array], op: Op) -> Array:
    """The reduction of `parts`, by NumPy."""
    n, dtype = len(parts), parts[0].dtype
    if not isinstance(op, ReduceOp):
        return sum((part * dtype.type(rank + 1) for rank, part in enumerate(parts)), np.zeros_like(parts[0]))
    if op is ReduceOp.MEAN:
        total = left_fold(np.add, parts)
        return np.asarray(total // n if dtype.kind in "iu" else total / n).astype(dtype)
    return np.asarray(left_fold(UFUNCS[op], parts)).astype(dtype)


def meaningful() -> Iterator[tuple[str, ReduceOp]]:
    """Every element type with every op that is defined for it."""
    for dtype in ("bool", *INTEGERS, *FLOATS, *COMPLEX):
        kind = np.dtype(dtype).kind
        for op in ReduceOp:
            is_bitwise = op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
            is_scaled = op in (ReduceOp.MEAN, ReduceOp.PREMUL_SUM)
            is_ordered = op in (ReduceOp.MIN, ReduceOp.MAX)
            if (
                not (is_bitwise and kind in "fc")
                and not (is_ordered and kind == "c")
                and not (is_scaled and kind == "b")
            ):
                yield dtype, op


def op_of(op: ReduceOp, rank: int) -> Op:
    """What `rank` passes for `op`."""
    return ReduceOp.premul_sum(rank + 1) if op is ReduceOp.PREMUL_SUM else op


def assert_equal(got: Any, expected: Array, what: str) -> None:
    """Equal in shape, type and value; a mean may differ in the last place."""
    assert isinstance(got, np.ndarray), f"{what}: {type(got).__name__} is no array"
    got = np.asarray(got)
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape}, expected {expected.shape}"
    tolerance = 2 * np.finfo(expected.dtype).eps if expected.dtype.kind in "fc" else 0.0
    assert np.allclose(got, expected, rtol=float(tolerance), atol=0), f"{what}: {got}, expected {expected}"


def assert_same_everywhere(backend: Backend, array: Array, what: str) -> None:
    """The same bits at every rank: each compares with its neighbour."""
    n = backend.world_size
    mine, theirs = blake2b(array.tobytes()).digest(), bytearray(64)
    backend.exchange(mine, (backend.rank + 1) % n, theirs, (backend.rank - 1) % n, tag=99)
    assert mine == theirs, f"{what}: ranks {backend.rank} and {(backend.rank - 1) % n} have different bits"


# --- reductions -------------------------------------------------------------------------------------------------------


@check(ranks=3)
def all_reduce_is_the_reduction_of_all_for_every_op_and_element_type(backend: Backend) -> None:
    context = DistributedContext(backend)
    for dtype, op in meaningful():
        parts = parts_of(3, (11,), dtype)
        x = parts[backend.rank].copy()
        result = context.all_reduce(x, op_of(op, backend.rank))
        assert result is x
        assert_equal(x, reduced(parts, op_of(op, 0)), f"{op.name} of {dtype}")


def _all_reduce_with_every_strategy(backend: Backend) -> None:
    context = DistributedContext(backend)
    n = backend.world_size
    for strategy in ALL_REDUCE:
        for count in COUNTS:
            what = f"{strategy} of {count}"
            parts = [np.random.default_rng([rank, count]).normal(size=count).astype(np.float32) for rank in range(n)]
            x = parts[backend.rank].copy()
            context.all_reduce(x, strategy=strategy)
            assert np.allclose(x, np.sum(parts, axis=0), rtol=1e-5, atol=1e-5), what
            assert_same_everywhere(backend, x, what)


@check(ranks=2)
def all_reduce_gives_two_ranks_the_same_bits_by_every_strategy(backend: Backend) -> None:
    _all_reduce_with_every_strategy(backend)


@check(ranks=3)
def all_reduce_gives_three_ranks_the_same_bits_by_every_strategy(backend: Backend) -> None:
    _all_reduce_with_every_strategy(backend)


@check(ranks=4)
def all_reduce_gives_four_ranks_the_same_bits_by_every_strategy(backend: Backend) -> None:
    _all_reduce_with_every_strategy(backend)


@check(ranks=4)
def reduce_gives_the_root_the_reduction_and_leaves_the_others_theirs(backend: Backend) -> None:
    context = DistributedContext(backend)
    for strategy in REDUCE:
        for root in range(4):
            for count in (0, 1, 1001, 300_007):
                parts = parts_of(4, (count,), "int32", seed=root)
                x = parts[backend.rank].copy()
                result = context.reduce(x, root, op_of(ReduceOp.PREMUL_SUM, backend.rank), strategy=strategy)
                assert result is x
                expected = reduced(parts, ReduceOp.premul_sum(1)) if backend.rank == root else parts[backend.rank]
                assert_equal(x, expected, f"{strategy} of {count} to {root}")


@check(ranks=3)
def reduce_works_for_every_op_and_element_type(backend: Backend) -> None:
    context = DistributedContext(backend)
    for turn, (dtype, op) in enumerate(meaningful()):
        parts = parts_of(3, (5,), dtype)
        x = parts[backend.rank].copy()
        context.reduce(x, turn % 3, op_of(op, backend.rank))
        expected = reduced(parts, op_of(op, 0)) if backend.rank == turn % 3 else parts[backend.rank]
        assert_equal(x, expected, f"{op.name} of {dtype}")


@check(ranks=3)
def reduce_scatter_gives_each_rank_its_reduced_part(backend: Backend) -> None:
    context = DistributedContext(backend)
    for dtype, op in meaningful():
        parts = parts_of(3, (3, 5), dtype)
        x = parts[backend.rank].copy()
        result = context.reduce_scatter(x, op_of(op, backend.rank))
        assert_equal(result, reduced(parts, op_of(op, 0))[backend.rank], f"{op.name} of {dtype}")
        assert_equal(x, parts[backend.rank], "what was passed is kept")
    for shape in ((3,), (3, 0), (3, 100_003), (3, 2, 2)):
        parts = parts_of(3, shape, "float64")
        result = context.reduce_scatter(parts[backend.rank])
        assert_equal(np.asarray(result), reduced(parts, ReduceOp.SUM)[backend.rank], f"{shape}")


# --- movements --------------------------------------------------------------------------------------------------------


@check(ranks=4)
def broadcast_gives_everybody_the_roots_array(backend: Backend) -> None:
    context = DistributedContext(backend)
    for strategy in BROADCAST:
        for root in range(4):
            for count in (0, 1, 1001, 300_007):
                parts = parts_of(4, (count,), "int32", seed=root)
                x = parts[backend.rank].copy()
                assert context.broadcast(x, root, strategy=strategy) is x
                assert_equal(x, parts[root], f"{strategy} of {count} from {root}")


@check(ranks=3)
def gathers_stack_what_the_ranks_have(backend: Backend) -> None:
    context = DistributedContext(backend)
    for dtype in ("bool", *INTEGERS, *FLOATS, *COMPLEX):
        for turn, shape in enumerate(SHAPES):
            parts = parts_of(3, shape, dtype)
            x = parts[backend.rank].copy()
            assert_equal(context.all_gather(x), np.stack(parts), f"all_gather of {dtype}{shape}")
            gathered = context.gather(x, turn % 3)
            if backend.rank == turn % 3:
                assert_equal(gathered, np.stack(parts), f"gather of {dtype}{shape}")
            else:
                assert gathered is None
            assert_equal(x, parts[backend.rank], "what was passed is kept")


@check(ranks=3)
def scatter_gives_each_rank_its_part(backend: Backend) -> None:
    context = DistributedContext(backend)
    for dtype in ("bool", *INTEGERS, *FLOATS, *COMPLEX):
        for turn, shape in enumerate(SHAPES):
            root = turn % 3
            whole = part_of(root, (3, *shape), dtype).astype(dtype)
            part = context.scatter(whole if backend.rank == root else None, root)
            assert_equal(np.asarray(part), whole[backend.rank : backend.rank + 1].reshape(shape), f"{dtype}{shape}")


@check(ranks=3)
def all_to_all_turns_rows_into_columns(backend: Backend) -> None:
    context = DistributedContext(backend)
    for dtype in ("bool", "uint8", "float16", "float64", "complex64"):
        for shape in (*SHAPES, (100_003,)):
            parts = parts_of(3, (3, *shape), dtype)
            result = context.all_to_all(parts[backend.rank])
            assert_equal(result, np.stack([part[backend.rank] for part in parts]), f"{dtype}{shape}")


@check(ranks=3)
def all_to_all_takes_parts_of_any_shapes_and_types(backend: Backend) -> None:
    context = DistributedContext(backend)

    def part(src: int, dst: int) -> Array:
        shape = ((), (0,), (src + 1, dst + 2), (70_001,))[(src + 2 * dst) % 4]
        return part_of(src, shape, ("float32", "bool", "int64")[(src + dst) % 3], seed=dst)

    result = context.all_to_all([part(backend.rank, dst) for dst in range(3)])
    assert isinstance(result, list)
    for src, got in enumerate(result):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        assert_equal(got, part(src, backend.rank), f"from {src}")


@check(ranks=3)
def arrays_go_between_two_ranks(backend: Backend) -> None:
    context = DistributedContext(backend)
    n, rank = 3, backend.rank
    for dtype in ("bool", *INTEGERS, *FLOATS, *COMPLEX):
        for shape in SHAPES:
            parts = parts_of(n, shape, dtype)
            into = np.zeros(shape, dtype)
            assert context.sendrecv(parts[rank], (rank + 1) % n, into, (rank - 1) % n, tag=5) is into
            assert_equal(into, parts[(rank - 1) % n], f"sendrecv of {dtype}{shape}")
    parts = parts_of(n, (6, 4), "float32")
    if rank == 0:
        context.send(parts[0][:, ::2], 1, tag=3)
    elif rank == 1:
        into = np.zeros((4, 6), np.float32)
        assert context.recv(into[::2].T, 0, tag=3) is not None
        assert_equal(into[::2].T.reshape(6, 2), parts[0][:, ::2], "a transposed target")
    context.barrier()


@check(ranks=3)
def objects_are_the_same_everywhere(backend: Backend) -> None:
    context = DistributedContext(backend)
    for root in range(3):
        plain = {"rank": root, "list": [1, 2.5, None, True, "naïve"], "bytes": b"\0\xff", "dict": {"a": {}}}
        thing = {"plain": plain, "array": part_of(root, (2, 3), "float32")}
        got = context.broadcast_object(thing if backend.rank == root else None, root)
        assert got["plain"] == plain
        assert_equal(got["array"], part_of(root, (2, 3), "float32"), "array")
    gathered = context.all_gather_object(["rank", backend.rank, "x" * 70_000 * backend.rank])
    assert gathered == [["rank", rank, "x" * 70_000 * rank] for rank in range(3)]


# --- arrays -----------------------------------------------------------------------------------------------------------


@check(ranks=2)
def arrays_may_have_any_layout_and_shape(backend: Backend) -> None:
    context = DistributedContext(backend)
    root = 0
    for shape in SHAPES:
        parts = parts_of(2, shape, "float32")
        x = parts[backend.rank].copy()
        assert_equal(context.all_reduce(x), reduced(parts, ReduceOp.SUM), f"all_reduce of {shape}")
        x = parts[backend.rank].copy()
        assert_equal(context.broadcast(x, root), parts[root], f"broadcast of {shape}")
    parts = parts_of(2, (6, 8), "int64")
    for view in (np.s_[:, ::2], np.s_[::-1], np.s_[1:4, 2], np.s_[::2, ::-3]):
        whole = parts[backend.rank].copy()
        x = whole[view]
        assert context.all_reduce(x) is x
        expected = parts[backend.rank].copy()
        expected[view] = reduced(parts, ReduceOp.SUM)[view]
        assert_equal(whole, expected, f"all_reduce of {view}")
        assert_equal(context.all_gather(parts[backend.rank][view]), np.stack([p[view] for p in parts]), f"{view}")
    fortran = np.asfortranarray(parts[backend.rank])
    context.broadcast(fortran, 1)
    assert_equal(fortran, parts[1], "broadcast into Fortran order")


@check(ranks=2)
def read_only_arrays_can_be_read_and_are_refused_where_they_would_be_written(backend: Backend) -> None:
    context = DistributedContext(backend)
    parts = parts_of(2, (2, 3), "float64")
    x = parts[backend.rank].copy()
    x.flags.writeable = False
    with raises(UnsupportedArrayError, saying="read-only"):
        context.all_reduce(x)
    with raises(UnsupportedArrayError, saying="read-only"):
        context.recv(x, 1 - backend.rank)
    with raises(UnsupportedArrayError, saying="read-only"):
        context.broadcast(x, 1 - backend.rank)
    assert_equal(context.all_gather(x), np.stack(parts), "all_gather")
    assert_equal(context.all_to_all(x), np.stack([part[backend.rank] for part in parts]), "all_to_all")
    assert_equal(context.reduce_scatter(x), reduced(parts, ReduceOp.SUM)[backend.rank], "reduce_scatter")
    context.broadcast(x if backend.rank == 0 else x.copy(), 0)
    context.reduce(x if backend.rank == 1 else x.copy(), 0)


@check(ranks=2)
def wrong_arguments_of_collectives_raise_before_a_byte_moves(backend: Backend) -> None:
    context = DistributedContext(backend)
    before = backend.traffic()
    x = np.zeros((2, 3), np.float32)
    wrong: Any = "wrong"
    if backend.rank == 0:  # the other rank makes none of these calls: they must not count as operations
        for kind, saying, call in (
            (InvalidArgumentError, "op='wrong'", lambda: context.all_reduce(x, wrong)),
            (InvalidArgumentError, "op", lambda: context.all_reduce(x, ReduceOp.PREMUL_SUM)),
            (UnsupportedOpError, "BAND", lambda: context.all_reduce(x, ReduceOp.BAND)),
            (UnsupportedOpError, "MEAN", lambda: context.reduce(x > 0, 0, ReduceOp.MEAN)),
            (UnsupportedOpError, "MAX", lambda: context.reduce_scatter(x.astype(np.complex64), ReduceOp.MAX)),
            (InvalidRankError, "root=2", lambda: context.broadcast(x, 2)),
            (InvalidRankError, "root=-1", lambda: context.reduce(x, -1)),
            (InvalidRankError, "root='wrong'", lambda: context.gather(x, wrong)),
            (InvalidArgumentError, "x=", lambda: context.scatter(None, 0)),
            (InvalidArgumentError, "x=", lambda: context.scatter(x, 1)),
            (InvalidArgumentError, "(3,)", lambda: context.scatter(np.zeros(3), 0)),
            (InvalidArgumentError, "(3,)", lambda: context.reduce_scatter(np.zeros(3))),
            (InvalidArgumentError, "()", lambda: context.all_to_all(np.array(1.0))),
            (InvalidArgumentError, "list of 3", lambda: context.all_to_all([x, x, x])),
            (UnsupportedArrayError, "x", lambda: context.all_reduce(wrong)),
            (UnsupportedArrayError, "x.dtype", lambda: context.all_reduce(np.array(["a"]))),
            (InvalidArgumentError, "strategy='wrong'", lambda: context.all_reduce(x, strategy=wrong)),
            (InvalidArgumentError, "strategy", lambda: context.broadcast(x, strategy=wrong)),
            (InvalidArgumentError, "timeout=0", lambda: context.all_reduce(x, timeout=0)),
            (InvalidArgumentError, "timeout=-1", lambda: context.barrier(timeout=-1)),
            (InvalidArgumentError, "obj", lambda: context.broadcast_object(object())),
            (InvalidRankError, "dst=2", lambda: context.send(x, 2)),
            (InvalidArgumentError, "tag=-1", lambda: context.send(x, 1, tag=-1)),
        ):
            with raises(kind, saying=saying):
                call()
        assert backend.traffic() == before
    assert_equal(context.all_reduce(x + 1), x + 2, "the group works")


# --- groups, order and time -------------------------------------------------------------------------------------------


@check(ranks=4)
def sub_groups_reduce_at_once_with_their_parent(backend: Backend) -> None:
    context = DistributedContext(backend)
    low = context.sub_group([0, 1])
    odd = context.sub_group([3, 1])
    assert (low is None) == (backend.rank > 1)
    assert (odd is None) == (backend.rank % 2 == 0)

    def work(group: DistributedContext | None, members: Sequence[int]) -> None:
        for turn in range(10 if group else 0):
            x = np.full(1000, backend.rank + turn, np.int64)
            group.all_reduce(x)  # pyright: ignore[reportOptionalMemberAccess]
            assert (x == sum(members) + turn * len(members)).all(), f"{members}, turn {turn}"

    at_once(lambda: work(context, range(4)), lambda: work(low, (0, 1)), lambda: work(odd, (1, 3)))


@check(ranks=3)
def asynchronous_operations_run_in_the_order_they_were_issued(backend: Backend) -> None:
    context = DistributedContext(backend)
    x = np.full(5000, backend.rank + 1, np.int64)
    works = [context.all_reduce(x, async_op=True), context.broadcast(x, 2, async_op=True)]
    works.append(context.all_gather(x, async_op=True))
    total = context.all_reduce(np.array([1]))  # a call that waits comes after them
    assert total[0] == 3
    assert all(work.is_completed() for work in works)
    assert works[0].wait() is x
    assert (works[2].result() == 6).all()
    assert works[2].exception() is None

    async def wait() -> Any:
        return await context.all_reduce(x, async_op=True)

    assert (asyncio.run(wait()) == 18).all()
    other = (backend.rank + 1) % 3
    sent = context.send(x, other, tag=4, async_op=True)
    came = context.recv(np.zeros_like(x), (backend.rank - 1) % 3, tag=4, async_op=True)
    assert (came.wait() == 18).all()
    sent.wait(10)
    backend.barrier()
    context.close()


@check(ranks=2)
def an_asynchronous_operation_hands_its_error_to_who_waits(backend: Backend) -> None:
    context = DistributedContext(backend)
    if backend.rank == 0:
        work = context.all_reduce(np.zeros(3), timeout=0.05, async_op=True)
        with raises(OperationTimeoutError):
            work.wait()
        assert isinstance(work.exception(), OperationTimeoutError)
        assert work.is_completed()
        backend.send(b"late", 1)
    else:
        backend.recv(bytearray(4), 0)
        with raises(DistributedError):
            context.all_reduce(np.zeros(3))
    context.close()


@check(ranks=1)
def a_world_of_one_has_every_collective_and_moves_no_bytes(backend: Backend) -> None:
    context = DistributedContext(backend)
    x = np.arange(6.0).reshape(1, 6)
    assert context.is_master
    assert_equal(context.all_reduce(x.copy(), ReduceOp.MEAN), x, "all_reduce")
    assert_equal(context.all_reduce(x.copy(), ReduceOp.premul_sum(2)), 2 * x, "premultiplied")
    assert_equal(context.reduce(x.copy(), 0, ReduceOp.premul_sum(2)), 2 * x, "reduce")
    assert_equal(context.broadcast(x.copy()), x, "broadcast")
    assert_equal(context.all_gather(x), x[np.newaxis], "all_gather")
    assert_equal(context.gather(x), x[np.newaxis], "gather")
    assert_equal(context.scatter(x), x[0], "scatter")
    assert_equal(context.reduce_scatter(x), x[0], "reduce_scatter")
    assert_equal(context.all_to_all(x), x, "all_to_all")
    assert_equal(context.all_to_all([x])[0], x, "all_to_all of a list")
    assert context.broadcast_object({"a": 1}) == {"a": 1}
    assert context.all_gather_object([1]) == [[1]]
    context.barrier()
    assert backend.traffic() == Traffic()


@check(ranks=2)
def operations_are_counted(backend: Backend) -> None:
    context = DistributedContext(backend)
    for _ in range(3):
        context.all_reduce(np.zeros(100, np.float32))
    context.barrier()
    snapshot = context.metrics_snapshot()
    assert snapshot.operations["all_reduce"].count == 3
    assert snapshot.operations["all_reduce"].failures == 0
    assert snapshot.operations["barrier"].count == 1
    assert snapshot.messages_sent == backend.traffic().messages_sent
