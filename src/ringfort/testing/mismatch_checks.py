"""Rules of ranks that call different things: all get an error that says so. Never a hang, never a wrong sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from ringfort.backends.base import Backend
from ringfort.backends.sub import SubBackend
from ringfort.collectives.ops import ReduceOp
from ringfort.config import AllReduceStrategy
from ringfort.context import DistributedContext
from ringfort.errors import CollectiveMismatchError, DistributedError
from ringfort.testing.check import check, collective_check, outermost_rank, raises, refuses
from ringfort.testing.ranks import at_once

TIMEOUT = 5.0
"""Seconds: a mismatch is found in milliseconds; one that is not found should fail soon."""

ENOUGH = 3
"""Failures after which a check of many pairs stops: each may have cost a timeout."""


@dataclass(frozen=True)
class Call:
    """A call of a rank, and how errors describe it."""

    words: str
    make: Callable[[DistributedContext], Any]


def _zeros(context: DistributedContext, count: int, dtype: str = "float32") -> Any:
    return np.zeros((context.world_size, count), dtype)


def _all_reduce(count: int, dtype: str, **options: Any) -> Callable[[DistributedContext], Any]:
    return lambda c: c.all_reduce(np.zeros(count, dtype), timeout=TIMEOUT, **options)


DIFFERENT = {
    "barrier": Call("barrier()", lambda c: c.barrier(timeout=TIMEOUT)),
    "all_reduce": Call("all_reduce(float32[4], SUM", _all_reduce(4, "f4")),
    "ring": Call("all_reduce(float64[400000], SUM, ring)", _all_reduce(400_000, "f8", strategy=AllReduceStrategy.RING)),
    "reduce": Call("reduce(float32[4], SUM, root=0", lambda c: c.reduce(np.zeros(4, "f4"), timeout=TIMEOUT)),
    "broadcast": Call("broadcast(float32[4], root=0", lambda c: c.broadcast(np.zeros(4, "f4"), timeout=TIMEOUT)),
    "all_gather": Call("all_gather(float32[4]", lambda c: c.all_gather(np.zeros(4, "f4"), timeout=TIMEOUT)),
    "gather": Call("gather(float32[4], root=0", lambda c: c.gather(np.zeros(4, "f4"), timeout=TIMEOUT)),
    "scatter": Call("scatter(root=0", lambda c: c.scatter(_zeros(c, 4) if c.rank == 0 else None, timeout=TIMEOUT)),
    "reduce_scatter": Call("reduce_scatter(float32[", lambda c: c.reduce_scatter(_zeros(c, 4), timeout=TIMEOUT)),
    "all_to_all": Call("all_to_all(float32[", lambda c: c.all_to_all(_zeros(c, 4), timeout=TIMEOUT)),
    "all_to_all_list": Call("all_to_all_list(", lambda c: c.all_to_all(list(_zeros(c, 4)), timeout=TIMEOUT)),
    "broadcast_object": Call("broadcast_object(root=0", lambda c: c.broadcast_object("a", timeout=TIMEOUT)),
    "all_gather_object": Call("all_gather_object(", lambda c: c.all_gather_object("a", timeout=TIMEOUT)),
}
"""One call per collective, and one of a large array: any two of them are a mismatch."""

VARIANTS = (
    ("all_reduce", Call("all_reduce(int32[4], SUM", _all_reduce(4, "i4"))),
    ("all_reduce", Call("all_reduce(float32[4], MAX", _all_reduce(4, "f4", op=ReduceOp.MAX))),
    ("all_reduce", Call("all_reduce(float32[5], SUM", _all_reduce(5, "f4"))),
    ("all_reduce", Call("all_reduce(float32[0], SUM", _all_reduce(0, "f4"))),
    ("all_reduce", Call("all_reduce(float32[400000], SUM", _all_reduce(400_000, "f4"))),
    ("ring", Call("all_reduce(float64[400000], MIN", _all_reduce(400_000, "f8", op=ReduceOp.MIN))),
    ("ring", Call(", tree(3))", _all_reduce(400_000, "f8", strategy=AllReduceStrategy.tree(3)))),
    ("ring", Call(", halving_doubling)", _all_reduce(400_000, "f8", strategy=AllReduceStrategy.HALVING_DOUBLING))),
    ("ring", Call("broadcast(float64[400000]", lambda c: c.broadcast(np.zeros(400_000), timeout=TIMEOUT))),
    ("reduce", Call("reduce(float32[4], SUM, root=1", lambda c: c.reduce(np.zeros(4, "f4"), 1, timeout=TIMEOUT))),
    ("broadcast", Call("broadcast(float32[4], root=1", lambda c: c.broadcast(np.zeros(4, "f4"), 1, timeout=TIMEOUT))),
    ("broadcast", Call("broadcast(float64[400000]", lambda c: c.broadcast(np.zeros(400_000), timeout=TIMEOUT))),
    ("gather", Call("gather(float32[4], root=1", lambda c: c.gather(np.zeros(4, "f4"), 1, timeout=TIMEOUT))),
    ("scatter", Call("root=1", lambda c: c.scatter(_zeros(c, 4) if c.rank == 1 else None, 1, timeout=TIMEOUT))),
    ("broadcast_object", Call("root=1", lambda c: c.broadcast_object("a", 1, timeout=TIMEOUT))),
)
"""A call above, and the same collective with another size, element type, op, root or strategy."""


PAIRS = (*combinations(DIFFERENT.values(), 2), *((DIFFERENT[name], variant) for name, variant in VARIANTS))


def _all_disagree(backend: Backend, pairs: Sequence[tuple[Call, Call]] = PAIRS) -> None:
    """Try each pair in a new group: one rank, another one each time, makes one call and the others the other call."""
    failures: list[str] = []
    for number, (common, odd) in enumerate(pairs):
        context = DistributedContext(SubBackend(backend, range(backend.world_size)))
        call = odd if backend.rank == number % backend.world_size else common
        try:
            with raises(CollectiveMismatchError) as caught:
                call.make(context)
                context.barrier(timeout=TIMEOUT)  # for a rank whose part was over before the mismatch was found
            told = str(caught.error)
            # A rank whose part was over gets the error in its next call.
            at_next = "barrier() as its operation 2" in told or caught.error.operation == 2
            missing = [words for words in (common.words, odd.words) if words not in told]
            assert len(missing) <= at_next, f"{missing} not in: {told}"
        except (AssertionError, DistributedError) as exc:
            failures.append(f"{common.words} against {odd.words}, which was ours: {call is odd}: {exc!r}")
            if len(failures) == ENOUGH:
                break
    assert not failures, "\n".join((f"{len(failures)} pairs or more", *failures))
    backend.barrier()  # no rank closes before all have got their error


@check(ranks=2)
def two_ranks_that_call_different_things_both_learn_it(backend: Backend) -> None:
    _all_disagree(backend)


@check(ranks=3)
def one_of_three_that_calls_something_else_is_found_by_all(backend: Backend) -> None:
    _all_disagree(backend)


@check(ranks=4)
def one_of_four_that_calls_something_else_is_found_by_all(backend: Backend) -> None:
    _all_disagree(backend, PAIRS[::3])


@check(ranks=3)
def a_call_that_one_rank_leaves_out_is_found_by_all(backend: Backend) -> None:
    for position in range(3):
        context = DistributedContext(SubBackend(backend, range(3)))
        with raises(CollectiveMismatchError):
            for turn in range(3):
                if backend.rank != 1 or turn != position:
                    context.all_reduce(np.zeros(4 + turn), timeout=TIMEOUT)
            context.barrier(timeout=TIMEOUT)


@collective_check(ranks=2)
def a_group_that_has_disagreed_stays_unusable(context: DistributedContext) -> None:
    with raises(CollectiveMismatchError, naming=outermost_rank(context.backend, 1 - context.rank)) as caught:
        context.all_reduce(np.zeros(3 + context.rank), timeout=TIMEOUT)
    assert caught.error.operation == 1
    assert caught.error.is_fatal
    refuses(CollectiveMismatchError, context.barrier, lambda: context.all_reduce(np.zeros(3)))


@check(ranks=3)
def a_disagreement_in_one_group_leaves_the_others_alone(backend: Backend) -> None:
    healthy, broken = (DistributedContext(SubBackend(backend, range(3))) for _ in range(2))

    def agree() -> None:
        for _ in range(20):
            healthy.barrier(timeout=TIMEOUT)

    def disagree() -> None:
        with raises(CollectiveMismatchError, saying="all_reduce"):
            broken.barrier(timeout=TIMEOUT) if backend.rank else broken.all_reduce(np.zeros(3), timeout=TIMEOUT)

    at_once(agree, disagree)
    assert healthy.all_reduce(np.ones(1))[0] == 3
