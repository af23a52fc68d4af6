"""`out=`: results in arrays that the caller has, the same as in new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringfort import DistributedContext, ReduceOp, SimulatedBackend
from ringfort.errors import InvalidArgumentError
from ringfort.testing.groups import closing_all
from ringfort.testing.ranks import results, run_ranks


def on_ranks(world_size: int, action: Callable[[DistributedContext], Any]) -> list[Any]:
    contexts = [DistributedContext(backend) for backend in SimulatedBackend.create_group(world_size)]
    with closing_all(contexts):
        return results(run_ranks(contexts, action))


def mine(ctx: DistributedContext, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(ctx.rank).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_parts_are_those_of_the_collectives_that_make_new_arrays(world_size: int) -> None:
    def check(ctx: DistributedContext) -> None:
        n, root = ctx.world_size, ctx.world_size - 1

        x, parts = mine(ctx, 7), mine(ctx, n, 4)
        # Parts of an array, and of another whose parts are not neighbours.
        for into in (np.zeros((n, 7), np.float32), np.zeros((7, n), np.float32).T):
            for out in (list(into), into):
                into.fill(0)
                assert len(ctx.all_gather(x, out=out)) == n
                assert np.array_equal(into, ctx.all_gather(x))
        into = np.zeros((n, 7), np.float32)
        ctx.gather(x, root, out=list(into) if ctx.rank == root else None)
        expected = ctx.gather(x, root)
        assert ctx.rank != root or np.array_equal(into, expected)
        for op in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.premul_sum(0.5), ReduceOp.MAX):
            part, kept = np.zeros(4, np.float32), parts.copy()
            assert ctx.reduce_scatter(list(parts), op, out=part) is part
            assert np.array_equal(part, ctx.reduce_scatter(kept, op))
            assert np.array_equal(parts, kept)
        into = np.zeros((n, 4), np.float32)
        ctx.all_to_all(list(parts), out=list(into))
        assert np.array_equal(into, ctx.all_to_all(parts))
        assert np.array_equal(ctx.all_to_all(parts, out=np.zeros_like(into)), into)
        part = np.zeros(4, np.float32)
        assert ctx.scatter(list(parts) if ctx.rank == root else None, root, out=part) is part
        assert np.array_equal(part, ctx.scatter(parts if ctx.rank == root else None, root))

    on_ranks(world_size, check)


def test_parts_may_have_any_sizes_if_both_sides_agree() -> None:
    def check(ctx: DistributedContext) -> list[float]:
        n = ctx.world_size
        parts = [np.full(dst, 10.0 * ctx.rank + dst) for dst in range(n)]
        into = [np.zeros(ctx.rank) for _ in range(n)]
        ctx.all_to_all(parts, out=into)
        return [float(part.sum()) for part in into]

    assert on_ranks(3, check) == [[0, 0, 0], [1, 11, 21], [4, 24, 44]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda c, x: c.all_reduce(x, out=x[:2]), "out='float32 of 2 elements'"),
        (lambda c, x: c.all_reduce(x, out=x.astype(np.int8)), "out='int8 of 3 elements'"),
        (lambda c, x: c.all_reduce(x, out=np.frombuffer(bytes(12), np.float32)), "^out=.*read-only.* out.copy"),
        (lambda c, x: c.all_reduce(x, out=3), "^out=3: not an array"),
        (lambda c, x: c.all_reduce(x, out=x, compression="int8"), "cannot be combined with compression"),
        (lambda c, x: c.all_gather(x, out=[x]), "out='list of 1'"),
        (lambda c, x: c.all_gather(x, out=[x, x[:2]]), r"out\[1\]='float32 of 2 elements'"),
        (lambda c, x: c.all_gather(x, out=[x, x.astype(np.int8)]), r"out\[1\]='int8 of 3 elements'"),
        (lambda c, x: c.scatter(None, 0, out=x), "the root must pass one array per rank"),
        (lambda c, x: c.scatter([x, x], 1, out=x), "only the root passes arrays"),
        (lambda c, x: c.reduce_scatter([x, x[:1]], out=x), r"x\[1\]"),
        (lambda c, x: c.reduce_scatter(np.stack([x, x]), out=x[:2]), "out='float32 of 2 elements'"),
        (lambda c, x: c.reduce_scatter(np.stack([x, x]), out=x.astype(np.float64)), "out='float64 of 3 elements'"),
        (lambda c, x: c.all_to_all(np.stack([x, x]), out=np.zeros((2, 3))), "out='float64 of 6 elements'"),
        (lambda c, x: c.all_to_all([x, x], out=[x[:1], x]), r"out\[0\]='float32 of 1 elements'"),
        (lambda c, x: c.all_to_all([x, x], out=[x.astype(np.int32)] * 2), r"out\[0\]='int32 of 3 elements'"),
        (lambda c, x: c.scatter(np.stack([x, x]), out=x.astype(np.float64)), "must match the other arrays"),
        (lambda c, x: c.gather(x, out=np.zeros((3, 3), np.float32)), "one part for each of 2 ranks"),
        (lambda c, x: c.all_gather(x, out=[x, np.frombuffer(bytes(12), np.float32)]), "read-only"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make: Callable[..., Any], words: str) -> None:
    with closing_all(SimulatedBackend.create_group(2)) as backends, pytest.raises(InvalidArgumentError, match=words):
        make(DistributedContext(backends[0]), np.zeros(3, np.float32))
