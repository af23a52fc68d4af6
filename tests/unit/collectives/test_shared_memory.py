"""Collectives over shared memory: the sizes at which they change their way, and the short cut of small all-reduces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ringfort import AllReduceStrategy, Backend, DistributedConfig, DistributedContext, ReduceOp
from ringfort.collectives import plan, shared_memory
from ringfort.collectives.shared_memory import BLOCK, SMALL_BYTES
from ringfort.errors import AbortedError, ChannelClosedError, CollectiveMismatchError, UnsupportedArrayError
from ringfort.telemetry import metrics
from ringfort.telemetry.metrics import MOST_RECENT
from ringfort.testing import run_ranks
from ringfort.testing.groups import tcp_group
from ringfort.testing.ranks import results
from ringfort.transport.arena import slot_bytes

CONFIG = DistributedConfig(timeout=20)


def on_ranks(world_size: int, program: Callable[[DistributedContext], Any]) -> Sequence[Any]:
    """What `program` returns at each rank of a group that shares memory."""

    def run(backend: Backend) -> Any:
        context = DistributedContext(backend)
        result = program(context)
        assert backend.group._arena is not None, "this group does not share memory"
        return result

    with tcp_group(world_size, CONFIG) as backends:
        return results(run_ranks(backends, run))


def sizes(world_size: int) -> list[int]:
    """Around those at which the way changes."""
    slot = slot_bytes(world_size)
    return [
        nbytes + extra
        for nbytes in (0, SMALL_BYTES, BLOCK, slot, 2 * slot, 3 * slot)
        for extra in (-4, 0, 4)
        if nbytes + extra >= 0
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_size_is_reduced_broadcast_and_gathered_whole(world_size: int) -> None:
    def program(context: DistributedContext) -> None:
        for nbytes in sizes(world_size):
            parts = [
                np.random.default_rng((nbytes, r)).integers(0, 1000, nbytes // 4, np.int32) for r in range(world_size)
            ]
            for _ in range(2):
                assert np.array_equal(context.all_reduce(parts[context.rank].copy()), sum(parts)), nbytes
                own, into = parts[context.rank].copy(), np.empty_like(parts[0])
                assert np.array_equal(context.all_reduce(own, out=into), sum(parts)), nbytes
                assert np.array_equal(own, parts[context.rank]), nbytes
            root = nbytes % world_size
            assert np.array_equal(context.broadcast(parts[context.rank].copy(), root=root), parts[root]), nbytes
            assert np.array_equal(context.all_gather(parts[context.rank]), parts), nbytes

    on_ranks(world_size, program)


@pytest.mark.parametrize("shift", [0, 1, 1000, 200_000, -1, -1000])
def test_a_result_may_overlap_what_is_reduced(shift: int) -> None:
    def program(context: DistributedContext) -> None:
        for nbytes in (400, slot_bytes(2), 3 * slot_bytes(2) + 20):
            size = nbytes // 4
            memory = np.zeros(size + abs(shift), np.int32)
            own, into = memory[max(0, -shift) :][:size], memory[max(0, shift) :][:size]
            parts = [np.random.default_rng((nbytes, r)).integers(0, 1000, size, np.int32) for r in range(2)]
            own[...] = parts[context.rank]
            assert np.array_equal(context.all_reduce(own, out=into), sum(parts)), nbytes

    on_ranks(2, program)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX, ReduceOp.premul_sum(3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_all_ranks_end_with_the_same_bits_at_every_way(op: Any, dtype: Any) -> None:
    def program(context: DistributedContext) -> list[bytes]:
        found: list[bytes] = []
        for size in (7, SMALL_BYTES, slot_bytes(context.world_size)):
            own = np.random.default_rng((size, context.rank)).standard_normal(size).astype(dtype)
            own[0] = np.nan if context.rank else np.inf
            found.extend(context.all_reduce(own.copy(), op).tobytes() for _ in range(2))
        return found

    first, *others = on_ranks(3, program)
    assert all(other == first for other in others)
    assert [first[i] for i in (0, 2, 4)] == [first[i] for i in (1, 3, 5)], "the second time goes another way"


def test_a_short_cut_is_for_its_own_kind_alone() -> None:
    def program(context: DistributedContext) -> list[list[float]]:
        one = ml_dtypes.bfloat16(1)
        arrays = [
            np.full(8, one),
            np.full(8, 1, np.uint16),
            np.full(8, 1, np.int16),
            np.full((2, 4), 1, np.uint16),
            np.full((8, 2), 1, np.uint16)[:, 0],
            np.full(9, 1, np.uint16),
        ]
        found = [context.all_reduce(array).astype(float).ravel().tolist() for _ in range(1) for array in arrays]
        for array in arrays:
            array.fill(2)
            assert set(context.all_reduce(array, ReduceOp.MAX).astype(float).ravel()) == {2.0}
            assert set(context.all_reduce(array).astype(float).ravel()) == {4.0}
        return found

    for found in on_ranks(2, program):
        assert {value for values in found for value in values} == {2.0}


def test_a_read_only_array_is_refused_on_the_short_cut_too() -> None:
    def program(context: DistributedContext) -> None:
        x = np.ones(3)
        context.all_reduce(x)
        x.flags.writeable = False
        with pytest.raises(UnsupportedArrayError):
            context.all_reduce(x)

    on_ranks(2, program)


def test_short_cuts_are_counted_like_all_others() -> None:
    def program(context: DistributedContext) -> None:
        for _ in range(5):
            context.all_reduce(np.ones(3))
        assert context.backend.group._arena is not None
        assert len(context.backend.group.fast_plans) == 1
        taken = context.metrics_snapshot().operations["all_reduce"]
        assert (taken.count, taken.failures, taken.bytes) == (5, 0, 120)

    on_ranks(2, program)


def test_two_contexts_of_one_backend_count_their_own_short_cuts() -> None:
    def program(context: DistributedContext) -> None:
        other = DistributedContext(context.backend)
        for one, calls in ((context, 3), (other, MOST_RECENT + 5), (context, 2)):
            for _ in range(calls):
                one.all_reduce(np.ones(3))
        counts = [one.metrics_snapshot().operations["all_reduce"].count for one in (context, other)]
        assert counts == [5, MOST_RECENT + 5]

    on_ranks(2, program)


def test_short_cuts_of_more_kinds_than_are_kept_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MOST_KINDS", 2)

    def program(context: DistributedContext) -> None:
        for _ in range(4):
            for size in range(1, 6):
                context.all_reduce(np.ones(size))
        taken = context.metrics_snapshot().operations["all_reduce"]
        assert (taken.count, taken.bytes) == (20, 4 * 8 * 15)

    on_ranks(2, program)


def test_a_short_cut_holds_its_turn() -> None:
    def program(context: DistributedContext) -> None:
        context.all_reduce(np.ones(3))
        (ready,) = context.backend.group.fast_plans.values()
        run, held = ready.run, list[bool]()

        def watched(flat: Any) -> None:
            held.append(context._runner.turn.locked())
            run(flat)

        ready.run = watched
        assert context.all_reduce(np.ones(3)).tolist() == [2.0] * 3
        assert held == [True]
        assert not context._runner.turn.locked()

    on_ranks(2, program)


def test_an_interrupt_before_a_short_cut_begins_leaves_the_turn_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(context: DistributedContext) -> None:
        context.all_reduce(np.ones(3))
        assert len(context.backend.group.fast_plans) == 1
        context.backend.barrier()  # not the context's own, whose clock is patched meanwhile
        if context.rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr("ringfort.context.perf_counter", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    context.all_reduce(np.ones(3))
        context.backend.barrier()
        assert context.all_reduce(np.ones(3)).tolist() == [2.0] * 3

    def interrupt() -> float:
        raise KeyboardInterrupt

    on_ranks(2, program)


def test_only_so_many_short_cuts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_REMEMBERED", 3)

    def program(context: DistributedContext) -> None:
        for size in range(10):
            assert context.all_reduce(np.ones(size)).tolist() == [2.0] * size
        assert context.backend.group._arena is not None
        assert len(context.backend.group.fast_plans) <= 3

    on_ranks(2, program)


def test_a_strategy_that_was_asked_for_is_taken() -> None:
    def program(context: DistributedContext) -> None:
        context.barrier()
        assert context.backend.group._arena is not None
        for _ in range(2):
            assert context.all_reduce(np.ones(3), strategy=AllReduceStrategy.RING)[0] == 2
        assert context.backend.group._arena.operations == 1

    on_ranks(2, program)


def test_asynchronous_ones_keep_their_place_among_the_others() -> None:
    def program(context: DistributedContext) -> None:
        context.all_reduce(np.ones(2))
        for turn in range(20):
            works = [context.all_reduce(np.full(2, float(turn + i)), async_op=True) for i in range(3)]
            assert context.all_reduce(np.full(2, 100.0 + turn))[0] == 2 * (100 + turn)
            assert [work.wait()[0] for work in works] == [2.0 * (turn + i) for i in range(3)]

    on_ranks(2, program)


def test_ranks_that_disagree_on_the_short_cut_both_learn_it() -> None:
    def program(context: DistributedContext) -> None:
        for size in (3, 4):
            context.all_reduce(np.ones(size))
        with pytest.raises(CollectiveMismatchError) as caught:
            context.all_reduce(np.ones(3 + context.rank))
        assert caught.value.peer == 1 - context.rank
        assert caught.value.operation == 4  # the first number was taken to make the arena
        with pytest.raises(CollectiveMismatchError):
            context.all_reduce(np.ones(3))

    on_ranks(2, program)


def test_after_an_abort_or_a_close_the_short_cut_is_closed_too() -> None:
    with tcp_group(2, CONFIG) as backends:
        contexts = [DistributedContext(backend) for backend in backends]
        results(run_ranks(contexts, lambda context: context.all_reduce(np.ones(3))))
        contexts[0].abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            contexts[0].all_reduce(np.ones(3))
        with pytest.raises(AbortedError, match="enough"):
            contexts[1].all_reduce(np.ones(3))
        contexts[0].close()
        with pytest.raises((ChannelClosedError, AbortedError)):
            contexts[0].all_reduce(np.ones(3))


def test_what_interrupts_a_reduce_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: set[int] = set()  # threads

    def reducer(a: Any, b: Any, out: Any) -> None:
        if threading.get_ident() in interrupted:
            raise KeyboardInterrupt
        np.add(a, b, out=out)

    monkeypatch.setattr(shared_memory, "_combiner", lambda _: reducer)

    def program(context: DistributedContext) -> None:
        context.all_reduce(np.ones(3))
        assert len(context.backend.group.fast_plans) == 1
        if context.rank == 0:
            interrupted.add(threading.get_ident())
            with pytest.raises(KeyboardInterrupt):
                context.all_reduce(np.ones(3))
        else:
            context.all_reduce(np.ones(3))
        with pytest.raises(AbortedError, match="interrupted"):
            context.all_reduce(np.ones(3))

    on_ranks(2, program)


@pytest.mark.parametrize("spare", [0, 1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 5, shared_memory._PIECE // 8, shared_memory._PIECE // 8 + 3])
def test_a_slice_is_reduced_in_the_order_of_the_ranks_and_put_down_twice(
    size: int, world_size: int, spare: int
) -> None:
    def twice_and(a: Any, b: Any, out: Any) -> None:
        np.copyto(out, 2 * a + b)

    shared_reducer = shared_memory.SharedReducer(np.dtype(np.int64), twice_and, twice_and, spare)
    for rank in range(world_size):
        parts = [np.arange(size) * 10 + r for r in range(world_size)]
        wanted = parts[0]
        for part in parts[1:]:
            wanted = 2 * wanted + part
        kept = [part.copy() for part in parts]
        result = np.empty(size, np.int64)
        apart = np.empty(size, np.int64)
        shared_memory.reduce_slice(shared_reducer, parts, rank, result, apart)
        assert result.tolist() == wanted.tolist() == apart.tolist()
        assert all((part == kept[r]).all() for r, part in enumerate(parts))
        shared_memory.reduce_slice(shared_reducer, parts, rank, result, parts[rank])
        assert result.tolist() == wanted.tolist() == parts[rank].tolist()
        assert all((part == kept[r]).all() for r, part in enumerate(parts) if r != rank), "nobody else's is touched"
