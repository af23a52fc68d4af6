"""Rules of calling collectives: with any array, in sub-groups, asynchronously, alone, and with wrong arguments."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringfort.backends.group import Traffic
from ringfort.collectives.ops import ReduceOp
from ringfort.context import DistributedContext
from ringfort.errors import (
    DistributedError,
    InvalidArgumentError,
    InvalidRankError,
    OperationTimeoutError,
    UnsupportedArrayError,
    UnsupportedOpError,
)
from ringfort.testing.check import collective_check, raises, refuses
from ringfort.testing.ranks import at_once
from ringfort.testing.reference import SHAPES, assert_equal, parts_of, reduced


@collective_check(ranks=2)
def arrays_may_have_any_layout_and_shape(context: DistributedContext) -> None:
    root = 0
    for shape in SHAPES:
        parts, x = parts_of(context, shape, "float32")
        assert_equal(context.all_reduce(x.copy()), reduced(parts), f"all_reduce of {shape}")
        assert_equal(context.broadcast(x, root), parts[root], f"broadcast of {shape}")
    for view in (np.s_[:, ::2], np.s_[::-1], np.s_[1:4, 2], np.s_[::2, ::-3]):
        parts, whole = parts_of(context, (6, 8), "int64")
        expected = whole.copy()
        expected[view] = reduced(parts)[view]
        x = whole[view]
        assert context.all_reduce(x) is x
        assert_equal(whole, expected, f"all_reduce of {view}")
        assert_equal(context.all_gather(parts[context.rank][view]), np.stack([p[view] for p in parts]), f"{view}")
    parts, x = parts_of(context, (6, 8), "int64")
    fortran = np.asfortranarray(x)
    context.broadcast(fortran, 1)
    assert_equal(fortran, parts[1], "broadcast into Fortran order")


@collective_check(ranks=2)
def read_only_arrays_can_be_read_and_are_refused_where_they_would_be_written(context: DistributedContext) -> None:
    parts, x = parts_of(context, (2, 3), "float64")
    x.flags.writeable = False
    other = 1 - context.rank
    refuses(
        UnsupportedArrayError,
        lambda: context.all_reduce(x),
        lambda: context.recv(x, other),
        lambda: context.broadcast(x, other),
        saying="read-only",
    )
    assert_equal(context.all_gather(x), np.stack(parts), "all_gather")
    assert_equal(context.all_to_all(x), np.stack([part[context.rank] for part in parts]), "all_to_all")
    assert_equal(context.reduce_scatter(x), reduced(parts)[context.rank], "reduce_scatter")
    context.broadcast(x if context.rank == 0 else x.copy(), 0)
    context.reduce(x if context.rank == 1 else x.copy(), 0)


@collective_check(ranks=2)
def wrong_arguments_of_collectives_raise_before_a_byte_moves(context: DistributedContext) -> None:
    before = context.backend.traffic()
    x = np.zeros((2, 3), np.float32)
    wrong: Any = "wrong"
    if context.rank == 0:  # the other rank makes none of these calls: they must not count as operations
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
            refuses(kind, call, saying=saying)
        assert context.backend.traffic() == before
    assert_equal(context.all_reduce(x + 1), x + 2, "the group works")


@collective_check(ranks=4)
def sub_groups_reduce_at_once_with_their_parent(context: DistributedContext) -> None:
    low = context.sub_group([0, 1])
    odd = context.sub_group([3, 1])
    assert (low is None) == (context.rank > 1)
    assert (odd is None) == (context.rank % 2 == 0)

    def work(group: DistributedContext | None, members: Sequence[int]) -> None:
        for turn in range(10 if group else 0):
            x = np.full(1000, context.rank + turn, np.int64)
            group.all_reduce(x)  # pyright: ignore[reportOptionalMemberAccess]
            assert (x == sum(members) + turn * len(members)).all(), f"{members}, turn {turn}"

    at_once(lambda: work(context, range(4)), lambda: work(low, (0, 1)), lambda: work(odd, (1, 3)))


@collective_check(ranks=3)
def asynchronous_operations_run_in_the_order_they_were_issued(context: DistributedContext) -> None:
    x = np.full(5000, context.rank + 1, np.int64)
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
    other = (context.rank + 1) % 3
    sent = context.send(x, other, tag=4, async_op=True)
    came = context.recv(np.zeros_like(x), (context.rank - 1) % 3, tag=4, async_op=True)
    assert (came.wait() == 18).all()
    assert sent is not None
    sent.wait(10)
    context.backend.barrier()
    context.close()


@collective_check(ranks=2)
def an_asynchronous_operation_hands_its_error_to_who_waits(context: DistributedContext) -> None:
    if context.rank == 0:
        work = context.all_reduce(np.zeros(3), timeout=0.05, async_op=True)
        with raises(OperationTimeoutError):
            work.wait()
        assert isinstance(work.exception(), OperationTimeoutError)
        assert work.is_completed()
        context.backend.send(b"late", 1)
    else:
        context.backend.recv(bytearray(4), 0)
        with raises(DistributedError):
            context.all_reduce(np.zeros(3))
    context.close()


@collective_check(ranks=1)
def a_world_of_one_has_every_collective_and_moves_no_bytes(context: DistributedContext) -> None:
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
    assert context.backend.traffic() == Traffic()


@collective_check(ranks=2)
def operations_are_counted(context: DistributedContext) -> None:
    for _ in range(3):
        context.all_reduce(np.zeros(100, np.float32))
    context.barrier()
    snapshot = context.metrics_snapshot()
    assert snapshot.operations["all_reduce"].count == 3
    assert snapshot.operations["all_reduce"].failures == 0
    assert snapshot.operations["barrier"].count == 1
    assert snapshot.messages_sent == context.backend.traffic().messages_sent
