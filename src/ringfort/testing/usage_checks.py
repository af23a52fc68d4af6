"""Rules of how collectives are called: with any array, in groups, asynchronously, alone, or wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringfort.backends.base import Backend
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
from ringfort.testing.check import check, raises
from ringfort.testing.ranks import at_once
from ringfort.testing.reference import SHAPES, assert_equal, parts_of, reduced


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
    assert sent is not None
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
