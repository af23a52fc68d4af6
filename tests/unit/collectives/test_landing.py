"""Collectives whose results land in arrays that the caller has: the same as those that make new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringfort import DistributedContext, ReduceOp, SimulatedBackend
from ringfort.collectives import landing
from ringfort.collectives.operation import Operation
from ringfort.errors import InvalidArgumentError
from ringfort.testing.ranks import results, run_ranks


def on_ranks(world_size: int, action: Callable[[DistributedContext], Any]) -> list[Any]:
    contexts = [DistributedContext(backend) for backend in SimulatedBackend.create_group(world_size)]
    try:
        return results(run_ranks(contexts, action))
    finally:
        for context in contexts:
            context.close()


def mine(ctx: DistributedContext, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(ctx.rank).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_parts_are_those_of_the_collectives_that_make_new_arrays(world_size: int) -> None:
    def check(ctx: DistributedContext) -> None:
        n, root = ctx.world_size, ctx.world_size - 1

        def run(operation: Operation) -> None:
            assert ctx.issue(operation, False) is None

        x, parts = mine(ctx, 7), mine(ctx, n, 4)
        # Parts of an array, and of another whose parts are not neighbours.
        for into in (np.zeros((n, 7), np.float32), np.zeros((7, n), np.float32).T):
            run(landing.all_gather(ctx.backend, x, list(into)))
            assert np.array_equal(into, ctx.all_gather(x))
        into = np.zeros((n, 7), np.float32)
        run(landing.gather(ctx.backend, x, list(into) if ctx.rank == root else None, root))
        expected = ctx.gather(x, root)
        assert ctx.rank != root or np.array_equal(into, expected)
        for op in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.premul_sum(0.5), ReduceOp.MAX):
            part, kept = np.zeros(4, np.float32), parts.copy()
            run(landing.reduce_scatter(ctx.backend, list(parts), part, op))
            assert np.array_equal(part, ctx.reduce_scatter(kept, op))
            assert np.array_equal(parts, kept)
        into = np.zeros((n, 4), np.float32)
        run(landing.all_to_all(ctx.backend, list(parts), list(into)))
        assert np.array_equal(into, ctx.all_to_all(parts))
        part = np.zeros(4, np.float32)
        run(landing.scatter(ctx.backend, list(parts) if ctx.rank == root else None, part, root))
        assert np.array_equal(part, ctx.scatter(parts if ctx.rank == root else None, root))

    on_ranks(world_size, check)


def test_parts_may_have_any_sizes_if_both_sides_agree() -> None:
    def check(ctx: DistributedContext) -> list[float]:
        n = ctx.world_size
        parts = [np.full(dst, 10.0 * ctx.rank + dst) for dst in range(n)]
        into = [np.zeros(ctx.rank) for _ in range(n)]
        ctx.issue(landing.all_to_all(ctx.backend, parts, into), False)
        return [float(part.sum()) for part in into]

    assert on_ranks(3, check) == [[0, 0, 0], [1, 11, 21], [4, 24, 44]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda b, x: landing.all_gather(b, x, [x]), "into='list of 1'"),
        (lambda b, x: landing.all_gather(b, x, [x, x[:2]]), r"into\[1\]='float32 of 2 elements'"),
        (lambda b, x: landing.all_gather(b, x, [x, x.astype(np.int8)]), r"into\[1\]='int8 of 3 elements'"),
        (lambda b, x: landing.gather(b, x, None, 0), "the root passes one array a rank"),
        (lambda b, x: landing.scatter(b, [x, x], x, 1), "only the root passes arrays"),
        (lambda b, x: landing.reduce_scatter(b, [x, x[:1]], x), r"parts\[1\]"),
        (lambda b, x: landing.all_to_all(b, [x, x], [x[:1], x]), "this rank's own part"),
        (lambda b, x: landing.all_gather(b, x, [x, np.frombuffer(bytes(12), np.float32)]), "read-only"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make: Callable[..., Operation], words: str) -> None:
    backends = SimulatedBackend.create_group(2)
    with pytest.raises(InvalidArgumentError, match=words):
        make(backends[0], np.zeros(3, np.float32))
    for backend in backends:
        backend.close()
