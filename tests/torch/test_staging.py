"""Tensors of a device through the host's memory, on a device that is not there: order, results and errors. What a real
GPU does with it is in tests/gpu."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from ringfort import (
    CollectiveMismatchError,
    DistributedConfig,
    DistributedContext,
    DistributedError,
    InvalidArgumentError,
    OperationTimeoutError,
    PeerLostError,
    SimulatedBackend,
)
from ringfort.testing.ranks import results, run_ranks
from ringfort.torch import staging
from ringfort.torch.cuda import CudaEngine
from ringfort.torch.point_to_point import Messages
from ringfort.torch.work import RingfortWork
from tests.torch.pretend import PretendDevice


class Rank(NamedTuple):
    """One rank of a group with a device."""

    rank: int
    world_size: int
    backend: SimulatedBackend
    engine: CudaEngine
    device: PretendDevice

    def abort(self, reason: str) -> None:
        self.backend.abort(reason)

    def late(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`tensor`, into which a slow kernel of the current stream puts `value`."""
        self.device.current().put(lambda: tensor.copy_(value))
        return tensor

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a kernel of the current stream sees in `tensor`."""
        seen = torch.empty_like(tensor)
        self.device.current().put(lambda: seen.copy_(tensor))
        self.device.synchronize()
        return seen


@contextmanager
def ranks(world_size: int, *, timeout: float = 20.0, is_whole: bool = False) -> Iterator[list[Rank]]:
    backends = SimulatedBackend.create_group(world_size, config=DistributedConfig(timeout=timeout))
    made: list[Rank] = []
    contexts = [DistributedContext(backend) for backend in backends]
    for backend, context in zip(backends, contexts, strict=True):
        device = PretendDevice()
        group = SimpleNamespace(
            context=context, _messages=Messages(context), _timeout=timeout, _sequence=0, _coalesced=None, _keep=_same
        )
        engine = CudaEngine(group, is_whole=is_whole, make=lambda _, device=device: device)
        made.append(Rank(backend.rank, world_size, backend, engine, device))
    try:
        yield made
    finally:
        for rank, context in zip(made, contexts, strict=True):
            context.close()
            rank.engine._group._messages.close()
            rank.device.close()


def _same(work: RingfortWork) -> RingfortWork:
    return work


def on_all(group: list[Rank], program: Callable[[Rank], Any]) -> list[Any]:
    return results(run_ranks(group, program))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 4096)


@pytest.fixture(params=["host", "stream"])
def wait(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who waits for the network."""
    monkeypatch.setenv("RINGFORT_CUDA_WAIT", request.param)
    return request.param


@pytest.fixture
def _the_stream_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_CUDA_WAIT", "stream")


def opts(kind: str, **settings: Any) -> Any:
    made = getattr(torch._C._distributed_c10d, f"{kind}Options")()
    for name, value in settings.items():
        setattr(made, name, value)
    return made


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("wait")
@pytest.mark.parametrize("is_whole", [False, True])
def test_every_collective_gives_what_it_must(is_whole: bool) -> None:
    def program(me: Rank) -> None:
        n, rank, engine = me.world_size, me.rank, me.engine
        for count in (0, 1, 1000, 30_000):
            mine = torch.arange(count, dtype=torch.float32) + rank
            every = [torch.arange(count, dtype=torch.float32) + r for r in range(n)]

            def check(work: RingfortWork, tensor: torch.Tensor, expected: torch.Tensor) -> None:
                work.wait()
                assert torch.equal(me.read(tensor), expected)

            x = me.late(torch.zeros(count), mine)
            check(engine.allreduce([x]), x, sum(every[1:], every[0]))
            x = me.late(torch.zeros(count), mine)
            check(engine.reduce([x], opts("Reduce", rootRank=1)), x, sum(every[1:], every[0]) if rank == 1 else mine)
            x = me.late(torch.zeros(count), mine)
            check(engine.broadcast([x], opts("Broadcast", rootRank=2)), x, every[2])
            into = torch.zeros(n * count)
            check(engine.all_gather_single(into, me.late(torch.zeros(count), mine)), into, torch.cat(every))
            places = [torch.zeros(count) for _ in range(n)]
            engine.allgather([places], [me.late(torch.zeros(count), mine)]).wait()
            assert torch.equal(torch.cat([me.read(place) for place in places]), torch.cat(every))
            into = torch.zeros(count)
            source = me.late(torch.zeros(n * count), torch.cat([mine + part for part in range(n)]))
            check(engine.reduce_scatter_single(into, source), into, sum(every[1:], every[0]) + n * rank)
            places = [torch.zeros(count) for _ in range(n)] if rank == 1 else []
            work = engine.gather([places], [me.late(torch.zeros(count), mine)], opts("Gather", rootRank=1))
            work.wait()
            if rank == 1:
                assert torch.equal(torch.cat([me.read(place) for place in places]), torch.cat(every))
            into = torch.zeros(count)
            sources = [[part + 1 for part in every]] if rank == 0 else []
            check(engine.scatter([into], sources, opts("Scatter", rootRank=0)), into, mine + 1)
            into = torch.zeros(n * count)
            source = me.late(torch.zeros(n * count), torch.cat([mine] * n))
            check(engine.all_to_all_single(into, source, [], []), into, torch.cat(every))

    with ranks(3, is_whole=is_whole) as group:
        on_all(group, program)


@pytest.mark.usefixtures("wait")
def test_parts_of_any_sizes_are_exchanged() -> None:
    def program(me: Rank) -> None:
        n, rank = me.world_size, me.rank
        rows = torch.arange(n * (n + 1) // 2 * 5000.0).view(-1, 5000)  # r + 1 rows for rank r
        into = torch.zeros((rank + 1) * n, 5000)
        me.engine.all_to_all_single(into, rows, [rank + 1] * n, list(range(1, n + 1))).wait()
        start = rank * (rank + 1) // 2
        assert torch.equal(me.read(into), rows[start : start + rank + 1].repeat(n, 1))

    with ranks(3) as group:
        on_all(group, program)


@pytest.mark.usefixtures("wait")
def test_what_is_not_contiguous_or_not_known_is_moved_all_the_same() -> None:
    def program(me: Rank) -> None:
        whole = torch.zeros(40, 100)
        x = whole.t()[::2]
        x += me.rank + 1
        me.engine.allreduce([x]).wait()
        assert torch.equal(me.read(whole).t()[::2], torch.full((50, 40), 3.0))
        assert not whole.t()[1::2].any()
        small = torch.full((3000,), me.rank + 1.0).to(torch.float8_e4m3fn)
        me.engine.broadcast([small], opts("Broadcast", rootRank=1)).wait()
        assert me.read(small).float().unique().tolist() == [2.0]

    with ranks(2) as group:
        on_all(group, program)


@pytest.mark.usefixtures("wait")
def test_messages_cross_between_devices_and_hosts() -> None:
    def program(me: Rank) -> None:
        engine, count = me.engine, 9000
        if me.rank == 0:
            sent = me.late(torch.zeros(count), torch.arange(float(count)))
            into = torch.zeros(count)
            received = engine.recv([into], 1, 3)
            engine.send([sent], 1, 3).wait()
            received.wait()
            assert torch.equal(me.read(into), torch.arange(float(count)) * 2)
            assert received.source_rank() == 1
            any_one = engine.recv_anysource([into], 4)
            any_one.wait()
            assert (any_one.source_rank(), float(me.read(into)[0])) == (1, 7.0)
            return
        memory = torch.zeros(count)  # of the host, as on a machine without a GPU
        me.backend.recv(memory.numpy(), 0, tag=3)
        me.backend.send((memory * 2).numpy(), 0, tag=3)
        engine.send([torch.full((count,), 7.0)], 0, 4).wait()

    with ranks(2) as group:
        on_all(group, program)


@pytest.mark.usefixtures("wait")
def test_whole_tensors_are_exchanged_with_ranks_that_have_them_in_the_hosts_memory() -> None:
    def program(me: Rank) -> None:
        x = torch.full((30_000,), me.rank + 1.0)
        if me.rank == 0:
            me.engine.allreduce([x]).wait()
            x = me.read(x)
        else:
            me.engine._group.context.all_reduce(x)
        assert x.unique().tolist() == [3.0]

    with ranks(2, is_whole=True) as group:
        on_all(group, program)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_call_returns_at_once_and_its_wait_when_the_others_have_come() -> None:
    """Rank 1 comes only when rank 0 has issued everything."""
    issued = threading.Event()

    def program(me: Rank) -> None:
        if me.rank == 1:
            assert issued.wait(20)
        tensors = [torch.full((6000,), float(turn)) for turn in range(4)]
        works = [me.engine.allreduce([x]) for x in tensors]
        if me.rank == 0:
            assert not any(work.is_completed() for work in works)
            issued.set()
        for turn, (x, work) in enumerate(zip(tensors, works, strict=True)):
            work.wait()
            assert me.read(x).unique().tolist() == [2.0 * turn]

    with ranks(2) as group:
        on_all(group, program)


@pytest.mark.usefixtures("_the_stream_waits")
def test_where_the_stream_waits_the_host_goes_on_before_the_others_have_come() -> None:
    """Rank 1 comes only when rank 0 has waited for everything, and gone on."""
    gone_on = threading.Event()

    def program(me: Rank) -> None:
        if me.rank == 1:
            assert gone_on.wait(20)
        tensors = [torch.full((6000 * (turn + 1),), float(turn)) for turn in range(4)]
        seen = [torch.empty_like(x) for x in tensors]
        for x, into in zip(tensors, seen, strict=True):
            me.engine.allreduce([x], opts("Allreduce", asyncOp=False))
            me.device.current().put(lambda x=x, into=into: into.copy_(x))
        if me.rank == 0:
            gone_on.set()
        me.device.synchronize()
        assert [into.unique().tolist() for into in seen] == [[2.0 * turn] for turn in range(4)]

    with ranks(2) as group:
        on_all(group, program)


def test_what_the_caller_does_after_a_call_does_not_hold_it_up() -> None:
    """Nor what it does before another call: else a kernel that waits for other ranks could wait for this one."""

    def program(me: Rank) -> None:
        first, second = torch.ones(30_000), torch.ones(30_000)
        go = threading.Event()
        begun = me.engine.allreduce([first])
        me.device.current().put(lambda: go.wait(20))  # a kernel that takes its time
        later = me.engine.allreduce([second])
        begun._work.wait()
        begun._ended().synchronize()
        assert not go.is_set()
        go.set()
        for x, work in ((first, begun), (second, later)):
            work.wait()
            assert me.read(x).unique().tolist() == [2.0]

    with ranks(2) as group:
        on_all(group, program)


@pytest.mark.usefixtures("wait")
def test_other_streams_than_the_first_are_waited_for_and_wait() -> None:
    def program(me: Rank) -> None:
        for turn in range(5):
            me.device.use(me.device.stream())
            x = me.late(torch.zeros(20_000), torch.full((20_000,), turn + me.rank * 10.0))
            work = me.engine.allreduce([x])
            me.device.use(me.device.stream())  # who waits is who uses it
            work.wait()
            assert me.read(x).unique().tolist() == [2 * turn + 10.0]

    with ranks(2) as group:
        on_all(group, program)


@pytest.mark.usefixtures("wait")
def test_many_calls_are_under_way_at_once() -> None:
    def program(me: Rank) -> None:
        tensors = [torch.full((5000,), float(turn)) for turn in range(20)]
        works = [me.engine.allreduce([x]) for x in tensors]
        for work in works:
            work.wait()
        assert [float(me.read(x).unique()) for x in tensors] == [2.0 * turn for turn in range(20)]
        assert all(work.is_completed() and work.is_success() for work in works)
        assert len(me.engine._stages) == 1
        (stage,) = me.engine._stages.values()
        assert len(stage._ring) == staging.BUFFERS

    with ranks(2) as group:
        on_all(group, program)


@pytest.mark.usefixtures("wait")
def test_memory_is_kept_for_both_streams_and_a_future_gives_the_tensors() -> None:
    def program(me: Rank) -> None:
        x = torch.ones(5000)
        work = me.engine.allreduce([x])
        (stage,) = me.engine._stages.values()
        for stream in (stage.down, stage.up):
            assert any(kept.data_ptr() == x.data_ptr() and where is stream for kept, where in me.device.kept)
        (result,) = work.get_future().wait()
        assert result is x
        assert me.read(x).unique().tolist() == [2.0]

    with ranks(2) as group:
        on_all(group, program)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_lost_peer_reaches_whoever_waits() -> None:
    def program(me: Rank) -> None:
        x = torch.ones(6000)
        me.engine.allreduce([x]).wait()
        me.device.synchronize()
        if me.rank == 1:
            me.backend.kill()
            return
        work = me.engine.allreduce([x])
        with pytest.raises(PeerLostError, match="lost rank 1"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(RuntimeError, match="lost rank 1"):
            work.get_future().wait()
        with pytest.raises(PeerLostError, match="lost rank 1"):
            me.engine.allreduce([x]).wait()

    with ranks(2) as group:
        on_all(group, program)


def test_after_an_error_nothing_is_written_behind_the_callers_back() -> None:
    """Some chunks of a result were on their way up when the other rank was lost."""
    chunks = 8

    def program(me: Rank) -> None:
        x = torch.ones(chunks * 1024)
        if me.rank == 1:
            make, left = me.engine._transfers.all_reduce, [chunks // 2]

            def until_half(tensor: torch.Tensor, op: Any) -> Any:
                transfer = make(tensor, op)
                run = transfer.make

                def next_one(parts: list[Any], seconds: float) -> Any:
                    left[0] -= 1
                    if left[0] < 0:
                        me.backend.kill()
                    return run(parts, seconds)

                transfer.make = next_one
                return transfer

            me.engine._transfers.all_reduce = until_half
            with pytest.raises(DistributedError):
                me.engine.allreduce([x]).wait()
            return
        with pytest.raises(PeerLostError, match="lost rank 1"):
            me.engine.allreduce([x]).wait()
        me.late(x, torch.full_like(x, 7.0))
        assert me.read(x).unique().tolist() == [7.0]

    with ranks(2) as group:
        on_all(group, program)


@pytest.mark.usefixtures("_the_stream_waits")
def test_a_lost_peer_opens_the_gates_and_every_later_call_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """And nothing is left that looks like a result."""
    issued = threading.Event()

    def program(me: Rank) -> None:
        x, y = torch.ones(30_000), torch.ones(3)
        me.engine.allreduce([x]).wait()
        me.device.synchronize()
        if me.rank == 1:
            assert issued.wait(20)
            me.backend.kill()
            return
        works = [me.engine.allreduce([one]) for one in (x, y)]
        issued.set()
        for work in works:
            with suppress(PeerLostError):  # if it is known by now
                work.wait()
        assert me.read(x).isnan().all()
        assert me.read(y).isnan().all()
        for work in works:
            with pytest.raises(PeerLostError, match="lost rank 1"):
                work._work.wait()
            assert not work.is_success()
        (stage,) = me.engine._stages.values()
        stage._is_told = False
        stage.close()
        for call in (works[0].wait, works[0].get_future, me.engine.check, lambda: me.engine.allreduce([x])):
            with pytest.raises(PeerLostError, match="lost rank 1"):
                call()

    with ranks(2) as group:
        on_all(group, program)
    assert "its result is not valid: lost rank 1" in caplog.text


@pytest.mark.usefixtures("_the_stream_waits")
@pytest.mark.parametrize("copies", [3, 6, 9])
def test_a_device_that_refuses_in_the_middle_leaves_no_gate_shut(copies: int) -> None:
    def program(me: Rank) -> None:
        x = torch.ones(10_000)
        copy, left = me.device.copy, [copies]

        def copy_some(stream: Any, into: torch.Tensor, source: torch.Tensor) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("out of memory")
            copy(stream, into, source)

        me.device.copy = copy_some
        with pytest.raises(RuntimeError, match="out of memory"):
            me.engine.allreduce([x])
        for stream in me.device.streams:
            me.device.record(stream).synchronize()

    with ranks(2, timeout=0.5) as group:
        on_all(group, program)


def test_a_peer_that_does_not_come_ends_with_the_groups_timeout() -> None:
    def program(me: Rank) -> None:
        if me.rank == 0:
            with pytest.raises(OperationTimeoutError, match="rank 1"):
                me.engine.allreduce([torch.ones(3)]).wait()

    with ranks(2, timeout=0.3) as group:
        on_all(group, program)


@pytest.mark.usefixtures("wait")
def test_a_wait_may_give_up_earlier_and_try_again() -> None:
    waited = threading.Event()

    def program(me: Rank) -> None:
        x = torch.ones(3)
        if me.rank == 1:
            assert waited.wait(20)
            me.engine.allreduce([x]).wait()
            return
        work = me.engine.allreduce([x])
        with pytest.raises(OperationTimeoutError, match="it goes on"):
            work.wait(timedelta(seconds=0.05))
        waited.set()
        work.wait()
        assert me.read(x).tolist() == [2.0] * 3

    with ranks(2) as group:
        on_all(group, program)


@pytest.mark.parametrize("counts", [(4000, 5000), (1000, 5000), (2048, 1024)])
def test_ranks_that_call_with_other_sizes_are_told(counts: tuple[int, int]) -> None:
    def program(me: Rank) -> str:
        x = torch.ones(counts[me.rank])

        def call_twice() -> None:
            for _ in range(2):  # a large one is never taken for two small ones
                me.engine.allreduce([x]).wait()

        with pytest.raises(CollectiveMismatchError) as caught:
            call_twice()
        return str(caught.value)

    with ranks(2) as group:
        for words in on_all(group, program):
            assert f"float32[{counts[0]}]" in words
            assert f"float32[{counts[1]}]" in words


def test_a_device_that_refuses_is_heard_by_whoever_waits() -> None:
    def program(me: Rank) -> None:
        x = torch.ones(6000)
        copy, left = me.device.copy, [3]

        def copy_thrice(stream: Any, into: torch.Tensor, source: torch.Tensor) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("out of memory")
            copy(stream, into, source)

        me.device.copy = copy_thrice
        work = me.engine.allreduce([x])
        with pytest.raises(RuntimeError, match="out of memory"):
            work.wait()
        assert isinstance(work.exception(), RuntimeError)

    with ranks(2) as group:
        on_all(group, program)


@pytest.mark.usefixtures("wait")
def test_wrong_arguments_are_refused_at_the_call_and_the_group_goes_on() -> None:
    def program(me: Rank) -> None:
        engine, x = me.engine, torch.ones(4)
        with pytest.raises(InvalidArgumentError, match="must have one tensor for each of 2 ranks"):
            engine.allgather([[x]], [x])
        with pytest.raises(InvalidArgumentError, match=r"output\[1\].*must match"):
            engine.allgather([[torch.ones(4), torch.ones(5)]], [x])
        with pytest.raises(InvalidArgumentError, match="cannot be divided by 2 ranks"):
            engine.reduce_scatter_single(x, torch.ones(5))
        with pytest.raises(InvalidArgumentError, match="must be dense"):
            engine.allreduce([x.to_sparse()])
        with pytest.raises(InvalidArgumentError, match="BAND"):
            engine.allreduce([x], opts("Allreduce", reduceOp=dist.ReduceOp.BAND))
        with pytest.raises(InvalidArgumentError, match="root"):
            engine.broadcast([x], opts("Broadcast", rootRank=7))
        with pytest.raises(InvalidArgumentError, match="at least one"):
            engine.allreduce([])
        engine.allreduce([x]).wait()
        assert me.read(x).tolist() == [2.0] * 4

    with ranks(2) as group:
        on_all(group, program)
