"""Persistent all-reduces: chains of exchanges that are prepared once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringfort import (
    AllReduceStrategy,
    Backend,
    CollectiveConfig,
    DistributedConfig,
    DistributedContext,
    ReduceOp,
    SimulatedBackend,
)
from ringfort.collectives import persistent
from ringfort.collectives.cost_model import BLOCK_BYTES, DOUBLING_BYTES, READY_BYTES
from ringfort.collectives.persistent import _VIEWED
from ringfort.collectives.plan import Run
from ringfort.collectives.shared_memory import SMALL_BYTES, SharedReducer
from ringfort.errors import AbortedError
from ringfort.testing import run_ranks
from ringfort.testing.groups import closing_all, tcp_group
from ringfort.testing.ranks import results


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each all-reduce that goes over links by a chain that was prepared."""
    found: list[int] = []
    make = persistent.over_links

    def spy(*arguments: Any) -> Run | None:
        through = make(*arguments)
        if through is None:
            return None

        def run(flat: Any, timeout: float | None = None) -> None:
            found.append(flat.nbytes)
            through(flat, timeout)

        return run

    monkeypatch.setattr(persistent, "over_links", spy)
    return found


@pytest.mark.parametrize("encryption", ["on", "off"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.float16])
def test_a_chain_gives_the_same_bits_at_every_rank_and_every_time(
    world_size: int, op: Any, dtype: Any, encryption: Any, short: list[int]
) -> None:
    if op is ReduceOp.MEAN and dtype is np.int32:
        op = ReduceOp.MIN
    nbytes = (64, _VIEWED - 8, _VIEWED, _VIEWED + 8, DOUBLING_BYTES + 8, BLOCK_BYTES, BLOCK_BYTES + 8, READY_BYTES)
    sizes = [size // np.dtype(dtype).itemsize for size in nbytes]

    def program(backend: Backend) -> list[tuple[bytes, bytes]]:
        context = DistributedContext(backend)
        found: list[tuple[bytes, bytes]] = []
        for size in sizes:
            own = np.random.default_rng((size, context.rank)).normal(0, 100, size).astype(dtype)
            if own.dtype == np.float32:
                own.view(np.uint32)[0] = 0x7FC00001 + context.rank  # a sum of two of them is one of them: the first
            found.append((context.all_reduce(own.copy(), op).tobytes(), context.all_reduce(own.copy(), op).tobytes()))
        return found

    one_thread = CollectiveConfig(connections=1)
    config = DistributedConfig(timeout=20, shared_memory="off", encryption=encryption, collective=one_thread)
    with tcp_group(world_size, config) as backends:
        first, *others = results(run_ranks(backends, program))
    assert all(one == again for one, again in first)
    assert all(other == first for other in others)
    assert len(short) == 2 * world_size * len(sizes)


def test_a_chain_serves_every_call_but_those_that_ask_for_a_strategy(short: list[int]) -> None:
    def program(backend: Backend) -> None:
        context = DistributedContext(backend)
        x = np.ones((3, 5), np.float32)
        context.all_reduce(x)
        assert context.all_reduce(x, async_op=True).wait() is x
        assert context.all_reduce(x, timeout=20) is x
        context.all_reduce(x, timeout=19)
        context.all_reduce(x.T)
        context.all_reduce(x, strategy=AllReduceStrategy.RING)
        assert set(x.ravel()) == {2.0**6}

    with tcp_group(2, DistributedConfig(timeout=20, shared_memory="off")) as backends:
        results(run_ranks(backends, program))
    assert short == [60] * 10  # all but those by a strategy that was asked for


def test_who_is_interrupted_between_two_exchanges_lets_its_partner_know(
    monkeypatch: pytest.MonkeyPatch, short: list[int]
) -> None:
    def program(backend: Backend) -> None:
        context = DistributedContext(backend)
        x = np.ones(BLOCK_BYTES, np.float32)
        context.all_reduce(x)
        if context.rank == 0:
            swap = backend.group.swap

            def interrupted(*arguments: Any) -> None:
                swap(*arguments)
                raise KeyboardInterrupt

            monkeypatch.setattr(backend.group, "swap", interrupted)
            with pytest.raises(KeyboardInterrupt):
                context.all_reduce(x)
        else:
            with pytest.raises(AbortedError):
                context.all_reduce(x)

    with tcp_group(2, DistributedConfig(timeout=20, shared_memory="off")) as backends:
        results(run_ranks(backends, program))
    assert len(short) == 4


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_more_than_a_frame_for_a_partner_is_no_chain(world_size: int) -> None:
    def chain(backend: Backend, count: int) -> Run | None:
        reducer = SharedReducer(np.dtype(np.float32), np.add, np.add)
        return persistent.over_links(backend.group, AllReduceStrategy.HALVING_DOUBLING, bytes(16), count, reducer)

    with closing_all(SimulatedBackend.create_group(world_size)) as backends:
        for backend in backends:
            assert chain(backend, READY_BYTES // 4) is not None
            assert chain(backend, READY_BYTES // 4 + 2) is None


@pytest.mark.parametrize("shared_memory", ["on", "off"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_chain_meets_a_rank_that_passes_a_timeout(world_size: int, shared_memory: Any) -> None:
    """The sizes are odd, so that shares are not alike."""
    sizes = [3, SMALL_BYTES // 4 + 1, BLOCK_BYTES // 4 + 1, READY_BYTES // 8 + 1, READY_BYTES // 4 - 1]

    def program(backend: Backend) -> None:
        context = DistributedContext(backend)
        for size in sizes:
            parts = [np.random.default_rng((size, r)).integers(0, 1000, size, np.int32) for r in range(world_size)]
            for turn in range(world_size + 1):
                timeout = 20.0 if turn and context.rank == turn - 1 else None
                total = context.all_reduce(parts[context.rank].copy(), timeout=timeout)
                assert np.array_equal(total, sum(parts)), (size, turn)

    with tcp_group(world_size, DistributedConfig(timeout=20, shared_memory=shared_memory)) as backends:
        results(run_ranks(backends, program))
