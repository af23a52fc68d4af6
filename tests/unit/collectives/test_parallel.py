"""Collectives over several connections at once: the same results, and one error for all parts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringfort import AllReduceStrategy, DistributedConfig, DistributedContext, ReduceOp, SimulatedBackend, SubBackend
from ringfort.backends.group import Group
from ringfort.collectives import parallel
from ringfort.config import CollectiveConfig
from ringfort.errors import (
    AbortedError,
    ChannelClosedError,
    CollectiveMismatchError,
    DistributedError,
    OperationTimeoutError,
    PeerLostError,
)
from ringfort.testing import VirtualClock, run_ranks
from ringfort.testing.groups import closing_all
from ringfort.testing.ranks import results
from ringfort.transport.engine import end_all
from ringfort.transport.machine import Machine
from tests.helpers.background import Background

COUNT = 10_007
"""Elements: a prime, so that nothing divides evenly."""
RING = AllReduceStrategy.RING
MACHINES = {rank: Machine(b"%d" % rank) for rank in range(4)}


@pytest.fixture(autouse=True)
def small_arrays_are_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "LEAST", 64)


def group_of(ranks: int, count: Any, clock: VirtualClock | None = None) -> list[SimulatedBackend]:
    config = DistributedConfig(collective=CollectiveConfig(connections=count))
    return SimulatedBackend.create_group(ranks, config=config, clock=clock)


def sent(backend: SimulatedBackend) -> list[dict[int, int]]:
    """For each connection the bytes sent to each peer."""
    return [
        {peer: link.outbound.bytes for peer, link in connection.engine.links.items() if link.outbound.bytes}
        for connection in backend.group.connections
    ]


CALLS: dict[str, Callable[[DistributedContext, Any], Any]] = {
    "all_reduce": lambda ctx, x: ctx.all_reduce(x, strategy=RING),
    "all_reduce by halves": lambda ctx, x: ctx.all_reduce(x, strategy=AllReduceStrategy.HALVING_DOUBLING),
    "all_reduce with a scale": lambda ctx, x: ctx.all_reduce(x, ReduceOp.premul_sum(ctx.rank + 1), strategy=RING),
    "mean": lambda ctx, x: ctx.all_reduce(x, ReduceOp.MEAN, strategy=RING),
    "reduce": lambda ctx, x: ctx.reduce(x, 1, ReduceOp.premul_sum(2)),
    "broadcast": lambda ctx, x: ctx.broadcast(x, 2),
    "all_gather": lambda ctx, x: ctx.all_gather(x),
    "gather": lambda ctx, x: ctx.gather(x, 1),
    "reduce_scatter": lambda ctx, x: ctx.reduce_scatter(np.stack([x, 2 * x, 3 * x]), ReduceOp.premul_sum(2)),
    "all_to_all": lambda ctx, x: ctx.all_to_all(np.stack([x, 2 * x, 3 * x])),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_over_connections_gives_what_it_gives_over_one_and_uses_all(name: str) -> None:
    def program(backend: SimulatedBackend) -> Any:
        x = (np.arange(COUNT) % 13 + backend.rank).astype(np.float64)  # whole numbers: sums are exact in any order
        result = CALLS[name](DistributedContext(backend), x)
        return x, result

    outcomes: list[list[Any]] = []
    for count in (1, 3):
        with closing_all(group_of(3, count)) as group:
            outcomes.append(results(run_ranks(group, program)))
            assert all(any(sent(backend)[number] for backend in group) for number in range(count))
    for one, many in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(one[0], many[0])
        np.testing.assert_array_equal(one[1], many[1])


def test_an_all_reduce_like_one_before_it_uses_all_connections_again() -> None:
    def program(backend: SimulatedBackend) -> list[dict[int, int]]:
        context = DistributedContext(backend)
        context.all_reduce(np.ones(COUNT))
        first = sent(backend)
        assert context.all_reduce(np.ones(COUNT)).tolist() == [2.0] * COUNT
        return [
            {peer: after[peer] - before[peer] for peer in after}
            for before, after in zip(first, sent(backend), strict=True)
        ]

    with closing_all(group_of(2, 2)) as backends:
        for bytes_of in results(run_ranks(backends, program)):
            assert all(sum(of.values()) > COUNT for of in bytes_of)


def test_every_other_connection_goes_round_the_other_way() -> None:
    with closing_all(group_of(3, 4)) as group:
        results(run_ranks(group, lambda backend: DistributedContext(backend).all_reduce(np.ones(COUNT), strategy=RING)))
        assert [list(peers) for peers in sent(group[0])] == [[1], [2], [1], [2]]


def test_a_ring_of_its_own_is_turned_round_too_also_in_a_sub_group() -> None:
    with closing_all(group_of(4, 2)) as group:
        for backend in group:
            engines = [connection.engine for connection in backend.group.connections]
            backend._group = Group(backend.rank, backend.config, engines, MACHINES, ring=(0, 2, 1, 3))
        subs = [SubBackend(backend, (0, 1, 3)) for backend in group if backend.rank != 2]
        results(run_ranks(group, lambda backend: DistributedContext(backend).all_reduce(np.ones(COUNT), strategy=RING)))
        assert [list(peers) for peers in sent(group[0])] == [[2], [3]]
        results(run_ranks(subs, lambda sub: DistributedContext(sub).all_reduce(np.ones(COUNT), strategy=RING)))
        assert [sorted(peers) for peers in sent(group[1])] == [[3], [0, 2]], "1 sends to 3 over both, else to 2 and 0"


def test_small_arrays_stay_on_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with closing_all(group_of(2, 2)) as group:
        results(run_ranks(group, lambda backend: DistributedContext(backend).all_reduce(np.ones(COUNT), strategy=RING)))
        assert sent(group[0])[1] == {}


# --- failing ----------------------------------------------------------------------------------------------------------


def large(backend: Any) -> Any:
    return DistributedContext(backend).all_reduce(np.ones(COUNT), strategy=RING)


def no_connection_runs() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("ringfort-connection")]


def test_one_broken_connection_ends_all_parts_with_one_error_and_only_this_group() -> None:
    with closing_all(group_of(3, 3)) as group:
        subs = [SubBackend(backend, range(3)) for backend in group]
        group[1]._pollers[2].streams[0].close()
        outcomes = run_ranks(subs, large)
        assert all(isinstance(outcome, DistributedError) for outcome in outcomes)
        assert no_connection_runs()
        assert isinstance(outcomes[0], PeerLostError)
        assert outcomes[0].peer == 1
        for sub in subs:
            with pytest.raises(DistributedError):
                sub.barrier()
        results(run_ranks(group, lambda backend: backend.barrier()))


def test_who_is_lost_over_one_connection_hears_over_the_others_who_has_lost_it() -> None:
    with closing_all(group_of(2, 2)) as (first, second):
        engines = [connection.engine for connection in first.group.connections]
        end_all(engines, 1, first.group.envelope(bytes(16)), PeerLostError(1, "cable pulled"))
        with pytest.raises(PeerLostError, match="its connection to this rank failed: cable pulled") as caught:
            second.barrier()
        assert caught.value.peer == 0


def test_a_rank_that_dies_is_lost_to_all_parts() -> None:
    with closing_all(group_of(3, 2)) as group:
        group[2].kill()
        outcomes = run_ranks(group[:2], large)
        assert [type(outcome) for outcome in outcomes] == [PeerLostError] * 2
        assert no_connection_runs()


def test_a_timeout_is_one_error_and_the_others_are_told() -> None:
    clock = VirtualClock()
    with closing_all(group_of(2, 3, clock)) as group:
        caller = Background(large, group[0])
        clock.wait_for_sleepers(3)
        clock.advance(61)
        with pytest.raises(OperationTimeoutError, match="all_reduce"):
            caller.result()
        with pytest.raises(AbortedError, match="timeout after 60 s"):
            large(group[1])
        assert no_connection_runs()


@pytest.mark.parametrize("count", [1, COUNT - 1])
def test_ranks_that_call_different_sizes_both_learn_it_whether_cut_or_not(count: int) -> None:
    with closing_all(group_of(2, 2)) as group:
        outcomes = run_ranks(
            group,
            lambda backend: DistributedContext(backend).all_reduce(
                np.ones(count if backend.rank else COUNT), strategy=RING
            ),
        )
        assert [type(outcome) for outcome in outcomes] == [CollectiveMismatchError] * 2
        assert no_connection_runs()


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda backend: backend.abort("enough"), AbortedError),
        (lambda backend: backend.close(), ChannelClosedError),
    ],
)
def test_what_another_thread_ends_is_over_in_all_parts(end: Callable[[Any], None], error: type[Exception]) -> None:
    clock = VirtualClock()
    group = group_of(2, 3, clock)
    caller = Background(large, group[0])
    clock.wait_for_sleepers(3)
    ending = [Background(end, group[0])]
    with pytest.raises(error):
        caller.wait(clock).result()
    assert no_connection_runs()
    ending += [Background(backend.close) for backend in group]
    for one in ending:
        one.wait(clock).result()


def test_the_first_part_that_fails_is_the_cause() -> None:
    class OddError(Exception):
        pass

    def program(backend: SimulatedBackend) -> None:
        envelope = backend.group.envelope(bytes(16))

        def move(connection: Any, span: tuple[int, int]) -> None:
            if backend.rank == 0 and connection is not backend.group:
                raise OddError
            connection.recv(bytearray(8), 1 - backend.rank, envelope)

        parallel.run_parts(backend.group, backend.group.connections, (0, 8), envelope, move)

    with closing_all(group_of(2, 2)) as group:
        outcomes = run_ranks(group, program)
        assert [type(outcome) for outcome in outcomes] == [OddError, AbortedError]
        assert no_connection_runs()
