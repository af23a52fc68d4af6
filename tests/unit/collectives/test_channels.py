"""Large all-reduces over channels: who moves what, how many are used, and how such a collective ends."""

from __future__ import annotations

import errno
import gc
import itertools
import pkgutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfort import AllReduceStrategy, DistributedConfig, DistributedContext, ReduceOp, SubBackend
from ringfort.collectives import algorithms, channel_setup, channels, cost_model
from ringfort.collectives.channels import Ladder, chunk_bytes, deal, rungs
from ringfort.config import MIB, CollectiveConfig, Shape
from ringfort.errors import (
    AbortedError,
    ChannelClosedError,
    CollectiveMismatchError,
    OperationTimeoutError,
    PeerLostError,
    RendezvousTimeoutError,
    TamperedError,
)
from ringfort.testing import run_ranks, tcp_group
from ringfort.testing.ranks import results
from ringfort.transport.channels import Channel, Share, Transfer, Wire
from ringfort.transport.messages import Job, Watch
from ringfort.transport.reducer import Array
from tests.helpers.background import PATIENCE, Background

CONFIG = DistributedConfig(timeout=20, shared_memory="off")
RING = AllReduceStrategy.RING
COUNT = 1_000_003
"""Elements of 4 bytes: enough for channels, and nothing divides evenly."""


@pytest.fixture(autouse=True)
def number(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many channels a group opens, on any machine. After the test no thread of one is left."""
    found = [2]
    monkeypatch.setattr(channels, "wanted", lambda table, asked: found[0])
    monkeypatch.setattr(channels, "CORES", 0)
    monkeypatch.setattr(channels, "PER_CHANNEL", MIB)
    yield found
    gc.collect()
    wait_until(lambda: not channel_threads())


def channel_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ringfort-channel")]


def wait_until(is_done: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not is_done():
        assert time.monotonic() < until
        time.sleep(0.001)


def all_reduce(backend: Any) -> Array:
    return DistributedContext(backend).all_reduce(np.full(COUNT, backend.rank + 1, np.float32))


def fails_at(call: Callable[..., Any], number: int, error: BaseException) -> Callable[..., Any]:
    """Return `call`, which raises `error` when it is called for the `number`th time."""
    calls = itertools.count(1)

    def once(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise error
        return call(*arguments, **options)

    return once


# --- who moves what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number_of", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 7, 101])
def test_the_shares_of_all_ranks_fit_together_and_reduce_everything(ranks: int, number_of: int, count: int) -> None:
    """Each channel by itself, with no order between channels and between ranks other than that of bytes and tokens."""
    shares = [
        deal([algorithms.ring_all_reduce(rank, ranks, count)] * number_of, lambda step: step.reduces or None, 1, 4)  # type: ignore[arg-type, return-value]
        for rank in range(ranks)
    ]
    data = [np.full(count, 10**rank) for rank in range(ranks)]
    for channel in range(number_of):
        wires = [deque[Any]() for _ in range(ranks)]
        tokens = [0] * ranks
        sends = [deque(share[channel].sends) for share in shares]
        receives = [deque(share[channel].receives) for share in shares]
        moved = True
        while moved:
            moved = False
            for rank in range(ranks):
                if sends[rank] and (not sends[rank][0][2] or tokens[rank]):
                    start, stop, is_passed_on, _ = sends[rank].popleft()
                    tokens[rank] -= is_passed_on
                    wires[(rank + 1) % ranks].append((start, stop, data[rank][start:stop].copy()))
                    moved = True
                if receives[rank] and wires[rank]:
                    start, stop, is_passed_on, reduces = receives[rank].popleft()
                    sent = wires[rank].popleft()
                    assert sent[:2] == (start, stop)
                    data[rank][start:stop] = sent[2] + (data[rank][start:stop] if reduces else 0)
                    tokens[rank] += is_passed_on
                    moved = True
        assert not any([*sends, *receives, *wires, *tokens])
    assert all((one == sum(10**rank for rank in range(ranks))).all() for one in data)


@pytest.mark.parametrize("nbytes", [2 * MIB, 5 * MIB, 512 * MIB])
@pytest.mark.parametrize("number_of", [1, 4])
def test_chunks_stay_within_what_a_record_holds_and_what_is_worth_two_threads(nbytes: int, number_of: int) -> None:
    for ranks in (2, 8, 64):
        assert channels.LEAST_CHUNK <= chunk_bytes(nbytes, ranks, number_of) <= channels.CHUNK <= MIB


@pytest.mark.parametrize(
    ("mib", "ranks", "count"), [(2, 2, 2), (2, 4, 1), (2, 8, 1), (4, 2, 2), (4, 4, 2), (8, 2, 4), (1024, 64, 4)]
)
def test_small_arrays_use_fewer_channels(mib: int, ranks: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert channels.used(4, mib * MIB, ranks) == count
    assert channels.used(1, mib * MIB, ranks) == 1


def test_a_channel_that_has_nothing_to_move_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "LEAST_CHUNK", MIB)
    monkeypatch.setattr(channels, "CHUNK", MIB)

    def program(backend: Any) -> float:
        x = np.ones(MIB // 2, np.float32)
        taken: list[float] = []
        for _ in range(5):
            begun = time.monotonic()
            DistributedContext(backend).all_reduce(x)
            taken.append(time.monotonic() - begun)
        return min(taken[2:])

    with tcp_group(2, CONFIG) as group:
        assert max(results(run_ranks(group, program))) < 0.15


@pytest.mark.parametrize(
    ("ranks", "count", "strategy"),
    [(3, COUNT, RING), (4, channels.LEAST // 4, AllReduceStrategy.AUTO)],
    ids=["ring", "the smallest"],
)
def test_the_result_has_the_same_bits_however_many_channels_there_are(
    ranks: int, count: int, strategy: AllReduceStrategy, number: list[int]
) -> None:
    given = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(ranks)]

    def program(backend: Any) -> Array:
        return DistributedContext(backend).all_reduce(given[backend.rank].copy(), strategy=strategy)

    found: list[bytes] = []
    for number[0] in (0, 1, 2, 4):
        with tcp_group(ranks, CONFIG) as group:
            reduced = run_ranks(group, program)
            found += [one.tobytes() for one in results(reduced)]
    assert len(set(found)) == 1


def test_an_array_can_be_reduced_into_another_one_also_into_one_that_overlaps() -> None:
    def program(backend: Any) -> None:
        context, memory = DistributedContext(backend), np.full(COUNT + 5, backend.rank + 1, np.int32)
        out = np.empty(COUNT, np.int32)
        context.all_reduce(memory[5:], out=out)
        assert (out == 3).all()
        assert (memory == backend.rank + 1).all()
        context.all_reduce(memory[5:], ReduceOp.MAX, out=memory[:-5])
        assert (memory[:-5] == 2).all()

    with tcp_group(2, CONFIG) as group:
        results(run_ranks(group, program))


def test_what_is_moved_is_counted() -> None:
    with tcp_group(2, CONFIG) as group:
        reduced_once(group)
        before = [backend.traffic() for backend in group]
        reduced_once(group)
        for backend, first in zip(group, before, strict=True):
            traffic = backend.traffic()
            assert traffic.bytes_sent - first.bytes_sent == traffic.bytes_received - first.bytes_received == 4 * COUNT
            assert sum(backend.group.sent()[0].values()) == traffic.bytes_sent


@pytest.mark.parametrize("asked", [1, 3])
def test_the_setting_overrides_what_the_machine_would_use(asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    config = DistributedConfig(timeout=20, shared_memory="off", collective=CollectiveConfig(connections=asked))
    with tcp_group(3, config) as group:
        assert all((one == 6).all() for one in results(run_ranks(group, all_reduce)))
        assert len(channel_threads()) == (0 if asked == 1 else 3 * 2 * asked)


# --- several hosts ----------------------------------------------------------------------------------------------------

HOSTS = (0, 0, 0, 3, 3)
"""Two rings between the hosts, and rank 2 is in neither of them."""


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfort.backends.group.hosts_of", lambda machines: HOSTS)
    monkeypatch.setattr(channels, "PER_CHANNEL", MIB // 4)


@pytest.mark.usefixtures("hosts")
def test_channels_of_ranks_on_several_hosts_go_only_from_host_to_host(number: list[int]) -> None:
    """And the result has the same bits with any number of them, also with none."""
    given = [np.random.default_rng(rank).standard_normal(COUNT).astype(np.float32) for rank in range(5)]

    def program(backend: Any) -> list[Array]:
        context, x = DistributedContext(backend), given[backend.rank].copy()
        out = np.empty_like(x)
        context.all_reduce(x, ReduceOp.MEAN, strategy=AllReduceStrategy.HIERARCHICAL, out=out)
        assert (x == given[backend.rank]).all()
        return [out, context.all_reduce(x, ReduceOp.MEAN, strategy=AllReduceStrategy.HIERARCHICAL)]

    found: list[bytes] = []
    for number[0] in (0, 2):
        with tcp_group(5, CONFIG) as group:
            found += [one.tobytes() for several in results(run_ranks(group, program)) for one in several]
            kept = [backend.group.part(channels._Kept).channels.all for backend in group]
            ends = [{(one.before, one.behind) for one in some} for some in kept]
            assert ends == [{(3, 3)}, {(4, 4)}, set(), {(0, 0)}, {(1, 1)}]
            assert [channels.count_for(backend.group, 4 * COUNT) for backend in group] == [number[0] or 1] * 5
    assert len(set(found)) == 1
    assert np.allclose(np.frombuffer(found[0], np.float32), sum(given) / 5, atol=1e-5)


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("asked", ["auto", 2])
def test_a_ring_through_several_ranks_of_a_host_has_no_channels(asked: Any) -> None:
    """They would go past the shared memory of the host."""
    config = replace(CONFIG, collective=CollectiveConfig(connections=asked))
    with tcp_group(5, config) as group:
        program: Callable[[Any], Array] = lambda backend: DistributedContext(backend).all_reduce(  # noqa: E731
            np.full(COUNT, backend.rank, np.int32), strategy=RING
        )
        assert all((one == 10).all() for one in results(run_ranks(group, program)))
        assert not channel_threads()


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("order", [(0, 0, 2, 2), (0, 0, 0, 3)], ids=["even", "uneven"])
def test_a_ring_that_auto_would_take_gives_way_to_channels_between_even_hosts_with_cores(
    wanted: int, order: tuple[int, ...], number: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    number[0] = wanted
    monkeypatch.setattr("ringfort.backends.group.hosts_of", lambda machines: order)
    monkeypatch.setattr(cost_model.CostModel, "choose", lambda self, kind, nbytes, element="": kind(Shape.RING))
    used: list[int] = []
    move = channels._move
    monkeypatch.setattr(channels, "_move", lambda *given: [used.append(given[0].rank), move(*given)])
    with tcp_group(4, CONFIG) as group:
        assert all((one == 10).all() for one in results(run_ranks(group, all_reduce)))
    assert sorted(used) == ([0, 1, 2, 3] if wanted and order[2] == 2 else [])


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("victim", [1, 2, 4], ids=["with a part", "without one", "on the other host"])
def test_a_rank_that_dies_on_one_of_several_hosts_is_named_at_once(victim: int) -> None:
    def program(backend: Any) -> Array:
        x = np.full(COUNT, backend.rank, np.float32)
        return DistributedContext(backend).all_reduce(x, strategy=AllReduceStrategy.HIERARCHICAL)

    with tcp_group(5, CONFIG) as group:
        results(run_ranks(group, program))
        waiting = [Background(program, backend) for backend in group if backend.rank != victim]
        time.sleep(0.05)
        group[victim].kill()
        begun = time.monotonic()
        for caller in waiting:
            with pytest.raises(PeerLostError) as caught:
                caller.result()
            assert caught.value.peer == victim
        assert time.monotonic() - begun < 1


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("each", "count"),
    [([0.5, 4], 1), ([1, 1], 0), ([1.4, 16], 0), ([1.5, 16], 1), ([2, 2], 1), ([4, 5], 2), ([8, 8], 4), ([64, 64], 4)],
)
def test_as_many_channels_as_the_cores_of_the_fullest_host_can_drive(
    each: Sequence[float], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert channels.wanted(np.array([[one] for one in each]), "auto") == count
    assert [channels.wanted(np.array([[one] for one in each]), asked) for asked in (1, 3)] == [0, 3]


def test_between_hosts_more_connections_than_the_cores_can_drive_are_compared_too() -> None:
    assert rungs(1, "auto", are_apart=True) == [0, 1, 4]
    assert rungs(0, "auto", are_apart=True) == [0, 4]
    assert rungs(2, "auto", are_apart=False) == [0, 1, 2]
    assert rungs(0, "auto", are_apart=False) == [0, 1]
    assert rungs(3, 3, are_apart=True) == [3]


def climb(ladder: Ladder, seconds: dict[int, float], calls: int) -> list[int]:
    """What each of `calls` used, where a call takes as long as `seconds` says for its number."""
    used: list[int] = []
    for _ in range(calls):
        count, is_timed = ladder.next(b"call")
        used.append(count)
        best = ladder.took(b"call", seconds[count]) if is_timed else None
        if best is not None:
            ladder.decide(np.array([best, best]))
    return used


def test_a_number_that_is_clearly_quicker_is_found_and_kept() -> None:
    ladder = Ladder([0, 1, 4], 1)
    assert climb(ladder, {0: 9.0, 1: 9.0, 4: 3.0}, 4) == [1, 4, 1, 4]
    climb(ladder, {0: 9.0, 1: 9.0, 4: 3.0}, 8)
    assert climb(ladder, {0: 9.0, 1: 9.0, 4: 3.0}, 20) == [4] * 20


def test_what_is_no_better_is_left_alone_and_looked_at_again_after_a_while() -> None:
    ladder = Ladder([0, 1, 2], 1)
    even = {0: 1.0, 1: 1.0, 2: 0.9}
    climb(ladder, even, 2 * channels.TRIALS)
    assert climb(ladder, even, channels.PAUSE) == [1] * channels.PAUSE
    assert set(climb(ladder, {0: 1.0, 1: 3.0, 2: 9.0}, 2 * channels.TRIALS)) == {0, 1, 2}
    assert ladder.number == 0, "the machine has become busy"


def test_one_number_is_not_compared() -> None:
    assert climb(Ladder([3], 3), {3: 1.0}, 9) == [3] * 9


def test_the_slowest_rank_decides() -> None:
    ladder = Ladder([1, 2], 1)
    ladder.decide(np.array([[4.0, 1.0], [4.0, 3.9]]))
    assert ladder.number == 1


def test_ranks_compare_in_large_calls_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "TRIAL", 4 * COUNT)

    def program(backend: Any) -> int:
        for _ in range(3 * channels.TRIALS):
            assert (all_reduce(backend) == 3).all()
        return channels.count_for(backend.group, 4 * COUNT)

    with tcp_group(2, CONFIG) as group:
        first, second = results(run_ranks(group, program))
        assert first == second, "which number it is, is the machine's business"


# --- how it ends ------------------------------------------------------------------------------------------------------


def reduced_once(group: Sequence[Any]) -> None:
    results(run_ranks(group, all_reduce))


def test_a_rank_that_dies_is_named_at_once() -> None:
    with tcp_group(3, CONFIG) as group:
        reduced_once(group)
        waiting = [Background(all_reduce, backend) for backend in group[:2]]
        time.sleep(0.05)
        group[2].kill()
        begun = time.monotonic()
        for caller in waiting:
            with pytest.raises(PeerLostError) as caught:
                caller.result()
            assert caught.value.peer == 2
        assert time.monotonic() - begun < 1


def test_a_connection_that_breaks_alone_ends_the_collective_and_names_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfort.transport.channels._GRACE", 0.1)
    with tcp_group(2, CONFIG) as group:
        reduced_once(group)
        caller = Background(all_reduce, group[0])
        time.sleep(0.05)
        kept = group[1].group.part(channels._Kept)
        kept.channels.all[1].stop()
        with pytest.raises(PeerLostError) as caught:
            caller.result()
        assert caught.value.peer == 1


def test_a_rank_that_never_comes_is_a_timeout_and_hears_of_it() -> None:
    with tcp_group(2, CONFIG) as group:
        reduced_once(group)
        with pytest.raises(OperationTimeoutError, match="all_reduce"):
            DistributedContext(group[0]).all_reduce(np.ones(COUNT, np.float32), timeout=0.2)
        with pytest.raises(AbortedError, match=r"timeout after 0\.2 s"):
            all_reduce(group[1])


@pytest.mark.parametrize(
    "other",
    [
        lambda context: context.all_reduce(np.ones(COUNT + 1, np.float32)),
        lambda context: context.all_reduce(np.ones(COUNT, np.float32), ReduceOp.MAX),
        lambda context: context.all_reduce(np.ones(5, np.float32)),
        lambda context: context.broadcast(np.ones(5, np.float32), 0),
        lambda context: context.barrier(),
    ],
    ids=["another size", "another op", "a small one", "one that waits for us", "barrier"],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["at first", "later"])
def test_ranks_that_call_different_things_all_learn_it(other: Callable[[Any], Any], is_first: bool) -> None:
    def program(backend: Any) -> None:
        if backend.rank == 1:
            other(DistributedContext(backend))
        else:
            all_reduce(backend)

    with tcp_group(3, CONFIG) as group:
        if not is_first:
            reduced_once(group)
        assert [type(outcome) for outcome in run_ranks(group, program)] == [CollectiveMismatchError] * 3


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda backend: backend.abort("enough"), AbortedError),
        (lambda backend: backend.close(), ChannelClosedError),
    ],
)
def test_what_another_thread_ends_is_over(end: Callable[[Any], None], error: type[Exception]) -> None:
    with tcp_group(2, CONFIG) as group:
        reduced_once(group)
        caller = Background(all_reduce, group[0])
        time.sleep(0.05)
        end(group[0])
        with pytest.raises(error):
            caller.result()
        with pytest.raises((AbortedError, ChannelClosedError)):
            all_reduce(group[1])


@pytest.mark.parametrize("end", [lambda group: group.fail(lambda: AbortedError("over")), lambda group: group.let_go()])
def test_a_collective_that_is_stopped_before_all_has_come_is_not_done(
    end: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that this rank sends fits into the buffers of the kernel, so both threads only wait when they are stopped."""
    monkeypatch.setattr(channels, "LEAST", 1)

    def small(backend: Any) -> Array:
        return DistributedContext(backend).all_reduce(np.ones(70_000, np.float32))

    for _ in range(6):  # 4 of 10 returned what had come until then
        with tcp_group(2, CONFIG) as group:
            results(run_ranks(group, small))
            caller = Background(small, group[0])
            time.sleep(0.02)
            end(group[0].group)
            with pytest.raises((AbortedError, ChannelClosedError)):
                caller.result()


def test_a_record_that_was_changed_is_tampering(monkeypatch: pytest.MonkeyPatch) -> None:
    with tcp_group(2, CONFIG) as group:
        reduced_once(group)
        channel: Channel = group[1].group.part(channels._Kept).channels.all[0]
        sealer = channel._out.sealer
        sealer._key = bytes(32)
        sealer._cipher = sealer.cipher(bytes(32))
        outcomes = run_ranks(group, all_reduce)
        assert [type(outcome) for outcome in outcomes] == [TamperedError, PeerLostError]


def test_a_rank_may_close_as_soon_as_it_is_done() -> None:
    def program(backend: Any) -> None:
        for _ in range(3):
            assert (all_reduce(backend) == 3).all()
        backend.close()

    for _ in range(5):
        with tcp_group(2, CONFIG) as group:
            results(run_ranks(group, program))


def test_a_fault_in_a_reduction_reaches_its_caller_and_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with tcp_group(2, CONFIG) as group:
        reduced_once(group)

        def reduce(*arguments: Any) -> None:
            raise MemoryError

        monkeypatch.setattr("ringfort.transport.channels._reduce", reduce)
        outcomes = run_ranks(group, all_reduce)
        assert {type(outcome) for outcome in outcomes} <= {MemoryError, AbortedError}
        assert MemoryError in map(type, outcomes)


def test_an_interrupt_before_all_threads_have_begun_waits_for_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ringfort.transport.channels._ENDING", 2 * PATIENCE)
    with tcp_group(2, CONFIG) as group:
        reduced_once(group)
        monkeypatch.setattr(Channel, "move", fails_at(Channel.move, 2, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            Background(all_reduce, group[0]).result()
        with pytest.raises((AbortedError, PeerLostError)):
            all_reduce(group[1])


def test_an_interrupt_while_channels_are_opened_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_setup, "connect", fails_at(channel_setup.connect, 1, KeyboardInterrupt()))
    with tcp_group(2, CONFIG) as group:
        callers = [Background(all_reduce, backend) for backend in group]
        with pytest.raises(KeyboardInterrupt):
            callers[1].result()
        with pytest.raises(AbortedError, match="KeyboardInterrupt"):
            callers[0].result()


def test_a_rank_that_leaves_while_channels_are_opened_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_setup, "_SECONDS", 2 * PATIENCE)
    is_there = threading.Event()

    def connect(*arguments: Any, **options: Any) -> None:
        is_there.set()
        time.sleep(0.05)
        raise RendezvousTimeoutError("opening channels", 1.0)

    monkeypatch.setattr(channel_setup, "connect", connect)
    with tcp_group(2, replace(CONFIG, timeout=4 * PATIENCE)) as group:
        callers = [Background(all_reduce, backend) for backend in group]
        assert is_there.wait(PATIENCE)
        group[1].close()
        for caller in callers:
            with pytest.raises(ChannelClosedError):
                caller.result()


def test_a_wait_that_ends_at_its_deadline_has_ended() -> None:
    with tcp_group(2, CONFIG) as group:
        engine, envelope = group[0].group.engine, group[0].group.envelope(bytes(16))
        watch = Watch(envelope, lambda: True, needs_link=False)
        engine.table.time_out(Job("watch", 1.0, 0.0, receive=watch, receive_link=engine.links[1]))
        assert not engine.table.failed_comms


def test_the_head_is_held_back_only_for_what_follows_at_once() -> None:
    """A chunk to be passed on may take any time, and the kernel would keep the head for 200 ms."""
    flags: list[int] = []

    class Socket(socket.socket):
        def send(self, data: Any, flag: int = 0) -> int:
            flags.append(flag)
            return super().send(data, flag)

    here, there = (Socket(fileno=end.detach()) for end in socket.socketpair())
    with here, there:
        channel = Channel(Wire(1, here, None, None), Wire(1, here, None, None), 8)
        data = memoryview(bytearray(8))
        transfer = Transfer(data, data, bytes(24), lambda: None, lambda peer, why: None, 2)
        channel._tokens.put(True)
        channel._send(transfer, Share(sends=[(0, 4, False, None)]))
        channel._send(transfer, Share(sends=[(0, 4, True, None)]))
    assert flags == [getattr(socket, "MSG_MORE", 0), 0, 0, 0]


def test_groups_and_their_sub_groups_use_their_channels_at_the_same_time() -> None:
    with tcp_group(3, CONFIG) as group:
        subs = [SubBackend(backend, (0, 1, 2)) for backend in group]
        callers = [Background(all_reduce, backend) for backend in (*group, *subs)]
        assert all((caller.result() == 6).all() for caller in callers)


def test_the_threads_end_with_the_group_that_nobody_holds() -> None:
    with tcp_group(2, CONFIG) as group:
        subs = [SubBackend(backend, (0, 1)) for backend in group]
        reduced_once(subs)
        assert len(channel_threads()) == 8
        del subs
        gc.collect()
        wait_until(lambda: not channel_threads())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux counts how often a thread wakes up")
def test_no_thread_of_an_idle_group_wakes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfort.transport.channels._LOOK_AGAIN", 0.05)  # how often one would, in a call that blocks

    def wakes() -> dict[str, int]:
        """How often each thread of the group has slept and been woken."""
        found: dict[str, int] = {}
        for thread in threading.enumerate():
            if thread.name.startswith("ringfort"):
                status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
                found[f"{thread.name} {thread.native_id}"] = int(status.split("voluntary_ctxt_switches:")[1].split()[0])
        return found

    with tcp_group(2, CONFIG) as group:
        reduced_once(group)
        assert len(channel_threads()) == 8
        wait_until(lambda: wakes() == (time.sleep(0.02), wakes())[1])  # all have gone to sleep after the call
        before = wakes()
        time.sleep(0.4)
        assert wakes() == before


def test_where_a_port_cannot_be_reached_all_stay_on_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*arguments: Any, **options: Any) -> None:
        raise ConnectionRefusedError("no route")

    monkeypatch.setattr(channel_setup, "connect", connect)
    monkeypatch.setattr(channel_setup, "_SECONDS", 0.3)
    with tcp_group(3, CONFIG) as group:
        assert all((one == 6).all() for one in results(run_ranks(group, all_reduce)))
        assert not channel_threads()


@pytest.mark.parametrize(
    ("what", "number_of", "error"),
    [
        ("ringfort.collectives.channel_setup.Listener", 2, OSError(errno.EMFILE, "Too many open files")),
        ("ringfort.bootstrap.listener.Listener.port_at", 1, OSError(errno.EMFILE, "Too many open files")),
        ("ringfort.transport.channels.Channel.begin", 4, RuntimeError("can't start new thread")),
        ("ringfort.transport.channels.Channel.__init__", 3, MemoryError()),
    ],
    ids=["listener", "port", "thread", "memory"],
)
def test_where_one_rank_lacks_something_for_channels_all_stay_on_their_links(
    what: str, number_of: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_setup, "_SECONDS", 1.0)
    with tcp_group(3, CONFIG) as group:
        module, name = what.rsplit(".", 1)
        owner = pkgutil.resolve_name(module)
        monkeypatch.setattr(owner, name, fails_at(getattr(owner, name), number_of, error))
        assert all((one == 6).all() for one in results(run_ranks(group, all_reduce)))
        wait_until(lambda: not channel_threads())


def test_idle_channels_are_kept_alive_as_the_links_are() -> None:
    with tcp_group(2, CONFIG) as group:
        reduced_once(group)
        backend = group[0]
        link = next(iter(backend.group.engine._poller._sockets.values()))  # type: ignore[attr-defined]
        channel = backend.group.part(channels._Kept).channels.all[0]
        names = [
            name for name in ("TCP_KEEPIDLE", "TCP_KEEPALIVE", "TCP_KEEPINTVL", "TCP_KEEPCNT") if hasattr(socket, name)
        ]
        for sock in (channel._out.sock, channel._into.sock):
            for name in names:
                option = socket.IPPROTO_TCP, getattr(socket, name)
                assert sock.getsockopt(*option) == link.getsockopt(*option), name
