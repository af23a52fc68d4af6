"""Random collectives, and what each must give: a hypothesis strategy for programs, and their run on a real group.

Every rank can make every rank's input from the same seed, so each checks its own result against NumPy alone; that the
results are the same to the bit everywhere is then checked by digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ringfort import AllReduceStrategy, BroadcastStrategy, DistributedContext, ReduceOp, ReduceStrategy
from ringfort.collectives.ops import Op
from ringfort.collectives.reduction import ELEMENT_TYPES

ROOTED = ("reduce", "broadcast", "gather", "scatter")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", *ROOTED)
KINDS = [kind.name for kind in ELEMENT_TYPES if kind.name != "bfloat16"]
"""bfloat16, which NumPy lacks, has its own tests in unit/collectives/test_kernels.py and the conformance suite."""
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


@dataclass(frozen=True)
class Call:
    """One collective. `members` are the sub-group that makes it, or None for all."""

    name: str
    kind: str
    count: int
    root: int
    op: Op
    strategy: str
    members: tuple[int, ...] | None
    seed: int
    is_async: bool


def ops_for(kind: str) -> list[Op]:
    """The reductions that have a meaning for elements of `kind`."""
    letter = np.dtype(kind).kind
    ops: list[Op] = [ReduceOp.SUM, ReduceOp.PRODUCT]
    if letter != "c":
        ops += [ReduceOp.MIN, ReduceOp.MAX]
    if letter in "biu":
        ops += BITWISE
    if letter != "b":
        ops += [ReduceOp.MEAN, ReduceOp.premul_sum(3)]
    return ops


@st.composite
def calls(draw: st.DrawFn, world_size: int) -> Call:
    """Any collective that is allowed."""
    kind = draw(st.sampled_from(KINDS))
    members = draw(st.none() | st.sets(st.integers(0, world_size - 1), min_size=1).map(lambda s: tuple(sorted(s))))
    size = world_size if members is None else len(members)
    # Around the block (256 KiB) and the window (1 MiB) the transport changes its ways.
    counts = st.integers(0, 40) | st.sampled_from([1000, 8192, 32768, 65537, 270_001])
    return Call(
        draw(st.sampled_from(COLLECTIVES)),
        kind,
        draw(counts),
        draw(st.integers(0, size - 1)),
        draw(st.sampled_from(ops_for(kind))),
        draw(st.sampled_from(["auto", "ring", "tree", "tree(3)", "direct", "halving_doubling", "hierarchical"])),
        members,
        draw(st.integers(0, 2**32 - 1)),
        draw(st.booleans()),
    )


def programs(world_size: int, length: int) -> st.SearchStrategy[list[Call]]:
    """Some collectives in a row."""
    return st.lists(calls(world_size), min_size=1, max_size=length)


def values(call: Call, rank: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The input of `rank`: small numbers, so that products of many ranks stay finite."""
    random = np.random.default_rng((call.seed, rank))
    drawn = random.integers(-3, 4, shape)
    kind = np.dtype(call.kind)
    if kind.kind == "b":
        return (drawn > 0).astype(kind)
    if kind.kind == "u":
        drawn = np.abs(drawn)
    if kind.kind in "fc":
        return (drawn + random.random(shape)).astype(kind)
    return drawn.astype(kind)


def reference(op: Op, inputs: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """What the reduction must give, computed apart from Ringfort; floats in double precision."""
    kind = inputs[0].dtype
    wide = {"f": np.float64, "c": np.complex128}.get(kind.kind, kind)
    stack = np.stack([array.astype(wide) for array in inputs])
    if not isinstance(op, ReduceOp):
        return (stack * stack.dtype.type(op.factor)).sum(0, dtype=stack.dtype)
    if op is ReduceOp.MEAN:
        total = stack.sum(0, dtype=stack.dtype)
        return np.trunc(total / len(inputs)).astype(kind) if kind.kind in "iu" else total / len(inputs)
    if kind.kind == "b":
        either = op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR)
        return stack.any(0) if either else np.bitwise_xor.reduce(stack) if op is ReduceOp.BXOR else stack.all(0)
    ufunc: Any = {
        ReduceOp.SUM: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
        ReduceOp.BAND: np.bitwise_and,
        ReduceOp.BOR: np.bitwise_or,
        ReduceOp.BXOR: np.bitwise_xor,
    }[op]
    return ufunc.reduce(stack, axis=0, dtype=stack.dtype)


def run_program(ctx: DistributedContext, program: Sequence[Call]) -> str:
    """Runs `program` as one rank, checks each result, and returns a digest of those that all ranks share."""
    digest = sha256()
    groups: dict[tuple[int, ...], DistributedContext | None] = {}
    for call in program:
        group: DistributedContext | None = ctx
        if call.members is not None:
            if call.members not in groups:
                groups[call.members] = ctx.sub_group(call.members)
            group = groups[call.members]
        if group is not None:
            shared = _RUN.get(call.name, _all_alike)(group, call)
            if shared is not None and call.members is None:
                digest.update(shared.tobytes())
    return digest.hexdigest()


def _wait(result: Any, call: Call) -> Any:
    return result.wait() if call.is_async else result


def _close(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], ranks: int) -> None:
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if got.dtype.kind in "fc":
        precision = float(np.finfo(got.dtype).eps)
        # Every step may round once; the largest partial result bounds what a rounding can be.
        np.testing.assert_allclose(got, expected, rtol=2 * ranks * precision, atol=8 * ranks * 4**ranks * precision)
    else:
        np.testing.assert_array_equal(got, expected)


def _all_reduce(ctx: DistributedContext, call: Call) -> np.ndarray[Any, Any]:
    n = ctx.world_size
    x = values(call, ctx.rank, (call.count,))
    strategy = AllReduceStrategy.parse(call.strategy)
    result = _wait(ctx.all_reduce(x, call.op, strategy=strategy, async_op=call.is_async), call)
    assert result is x
    _close(x, reference(call.op, [values(call, rank, (call.count,)) for rank in range(n)]), n)
    return x


def _rooted_strategy(kind: Callable[[str], Any], call: Call) -> Any:
    return kind("auto" if call.strategy == "halving_doubling" else call.strategy)


def _reduce(ctx: DistributedContext, call: Call) -> None:
    n = ctx.world_size
    x = values(call, ctx.rank, (call.count,))
    strategy = _rooted_strategy(ReduceStrategy.parse, call)
    _wait(ctx.reduce(x, call.root, call.op, strategy=strategy, async_op=call.is_async), call)
    inputs = [values(call, rank, (call.count,)) for rank in range(n)]
    if ctx.rank == call.root:
        _close(x, reference(call.op, inputs), n)
    else:
        np.testing.assert_array_equal(x, inputs[ctx.rank])


def _broadcast(ctx: DistributedContext, call: Call) -> np.ndarray[Any, Any]:
    x = values(call, ctx.rank, (call.count,))
    strategy = _rooted_strategy(BroadcastStrategy.parse, call)
    _wait(ctx.broadcast(x, call.root, strategy=strategy, async_op=call.is_async), call)
    np.testing.assert_array_equal(x, values(call, call.root, (call.count,)))
    return x


def _gather(ctx: DistributedContext, call: Call) -> None:
    x = values(call, ctx.rank, (call.count,))
    got = _wait(ctx.gather(x, call.root, async_op=call.is_async), call)
    if ctx.rank == call.root:
        np.testing.assert_array_equal(got, np.stack([values(call, r, (call.count,)) for r in range(ctx.world_size)]))
    else:
        assert got is None


def _scatter(ctx: DistributedContext, call: Call) -> None:
    shape = (ctx.world_size, call.count)
    x = values(call, call.root, shape) if ctx.rank == call.root else None
    got = _wait(ctx.scatter(x, call.root, async_op=call.is_async), call)
    np.testing.assert_array_equal(got, values(call, call.root, shape)[ctx.rank])


def _all_gather(ctx: DistributedContext, call: Call) -> np.ndarray[Any, Any]:
    got = _wait(ctx.all_gather(values(call, ctx.rank, (call.count,)), async_op=call.is_async), call)
    np.testing.assert_array_equal(got, np.stack([values(call, r, (call.count,)) for r in range(ctx.world_size)]))
    return got


def _reduce_scatter(ctx: DistributedContext, call: Call) -> None:
    n, shape = ctx.world_size, (ctx.world_size, call.count)
    got = _wait(ctx.reduce_scatter(values(call, ctx.rank, shape), call.op, async_op=call.is_async), call)
    _close(got, reference(call.op, [values(call, rank, shape)[ctx.rank] for rank in range(n)]), n)


def _all_to_all(ctx: DistributedContext, call: Call) -> None:
    shape = (ctx.world_size, call.count)
    got = _wait(ctx.all_to_all(values(call, ctx.rank, shape), async_op=call.is_async), call)
    np.testing.assert_array_equal(got, np.stack([values(call, r, shape)[ctx.rank] for r in range(ctx.world_size)]))


def _all_alike(ctx: DistributedContext, call: Call) -> None:
    _wait(ctx.barrier(async_op=call.is_async), call)


_RUN: dict[str, Callable[[DistributedContext, Call], np.ndarray[Any, Any] | None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
