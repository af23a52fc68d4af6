"""Collectives and messages of CUDA tensors through host memory, on a pretended GPU: order, results and errors.

The tests on a real one are in tests/gpu.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
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
    GradientCompressor,
    InvalidArgumentError,
    OperationTimeoutError,
    PeerLostError,
    ReduceOp,
    SimulatedBackend,
    UnsupportedArrayError,
)
from ringfort.telemetry.trace import own_trace
from ringfort.testing.ranks import results, run_ranks
from ringfort.torch import staging
from ringfort.torch.compression import _all_reduce, _reduce_scatter
from ringfort.torch.cuda import CudaEngine
from ringfort.torch.operations import Call
from ringfort.torch.process_group import RingfortProcessGroup
from ringfort.torch.staged_view import staged_view
from ringfort.torch.work import RingfortWork
from tests.torch.pretend import PretendDevice


class Rank(NamedTuple):
    """One rank of a group with a device."""

    rank: int
    world_size: int
    backend: SimulatedBackend
    group: RingfortProcessGroup
    device: PretendDevice

    @property
    def stage(self) -> staging.Stage:
        return self.group.engines["cpu"].stage(torch.device("cpu"))

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
def ranks(world_size: int, *, timeout: float = 20.0, chunk_bytes: int = 4096) -> Iterator[list[Rank]]:
    """The ranks of a group that serves CPU tensors as if they were on a GPU, in small chunks."""
    backends = SimulatedBackend.create_group(world_size, config=DistributedConfig(timeout=timeout))
    made: list[Rank] = []
    for backend in backends:
        device = PretendDevice()
        group = RingfortProcessGroup(None, DistributedContext(backend), timeout)
        group.engines["cpu"] = CudaEngine(group.context, chunk_bytes=chunk_bytes, make=lambda _, device=device: device)
        made.append(Rank(backend.rank, world_size, backend, group, device))
    try:
        yield made
    finally:
        for rank in made:
            rank.group.shutdown()
            rank.device.close()


def on_all(group: list[Rank], program: Callable[[Rank], Any]) -> list[Any]:
    return results(run_ranks(group, program))


def options(kind: str, **settings: Any) -> Any:
    made = getattr(torch._C._distributed_c10d, f"{kind}Options")()
    for name, value in settings.items():
        setattr(made, name, value)
    return made


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [4096, 0])
@pytest.mark.parametrize("is_async", [True, False])
def test_every_collective_gives_what_it_must(chunk_bytes: int, is_async: bool) -> None:
    def program(me: Rank) -> None:
        n, rank, group = me.world_size, me.rank, me.group

        def opts(kind: str, **settings: Any) -> Any:
            return options(kind, asyncOp=is_async, **settings)

        for count in (0, 1, 1000, 30_000):
            mine = torch.arange(count, dtype=torch.float32) + rank
            every = [torch.arange(count, dtype=torch.float32) + r for r in range(n)]

            def check(work: RingfortWork, tensor: torch.Tensor, expected: torch.Tensor) -> None:
                work.wait()
                assert torch.equal(me.read(tensor), expected)

            x = me.late(torch.zeros(count), mine)
            check(group.allreduce([x], opts("Allreduce")), x, sum(every[1:], every[0]))
            x = me.late(torch.zeros(count), mine)
            check(group.reduce([x], opts("Reduce", rootRank=1)), x, sum(every[1:], every[0]) if rank == 1 else mine)
            x = me.late(torch.zeros(count), mine)
            check(group.broadcast([x], opts("Broadcast", rootRank=2)), x, every[2])
            into, source = torch.zeros(n * count), me.late(torch.zeros(count), mine)
            check(group.all_gather_single(into, source, opts("Allgather")), into, torch.cat(every))
            places = [torch.zeros(count) for _ in range(n)]
            group.allgather([places], [me.late(torch.zeros(count), mine)], opts("Allgather")).wait()
            assert torch.equal(torch.cat([me.read(place) for place in places]), torch.cat(every))
            into = torch.zeros(count)
            source = me.late(torch.zeros(n * count), torch.cat([mine + part for part in range(n)]))
            work = group.reduce_scatter_single(into, source, opts("ReduceScatter"))
            check(work, into, sum(every[1:], every[0]) + n * rank)
            places = [torch.zeros(count) for _ in range(n)] if rank == 1 else []
            work = group.gather([places], [me.late(torch.zeros(count), mine)], opts("Gather", rootRank=1))
            work.wait()
            if rank == 1:
                assert torch.equal(torch.cat([me.read(place) for place in places]), torch.cat(every))
            into = torch.zeros(count)
            sources = [[part + 1 for part in every]] if rank == 0 else []
            check(group.scatter([into], sources, opts("Scatter", rootRank=0)), into, mine + 1)
            into = torch.zeros(n * count)
            source = me.late(torch.zeros(n * count), torch.cat([mine] * n))
            check(group.all_to_all_single(into, source, [], [], opts("AllToAll")), into, torch.cat(every))

    with ranks(3, chunk_bytes=chunk_bytes) as group:
        on_all(group, program)


def test_several_tensors_per_rank_and_tensors_that_share_memory_are_reduced_as_on_the_cpu() -> None:
    def program(me: Rank) -> None:
        pair = [torch.full((2000,), float(2 * me.rank + index)) for index in range(2)]
        me.group.allreduce(pair).wait()
        assert [me.read(x).unique().tolist() for x in pair] == [[6.0]] * 2
        pair = [torch.full((2000,), float(2 * me.rank + index)) for index in range(2)]
        me.group.broadcast(pair, options("Broadcast", rootRank=1, rootTensor=1)).wait()
        assert [me.read(x).unique().tolist() for x in pair] == [[3.0]] * 2
        lists = [[torch.zeros(2000) for _ in range(4)] for _ in range(2)]
        me.group.allgather(lists, [torch.full((2000,), float(2 * me.rank + index)) for index in range(2)]).wait()
        assert [[float(me.read(x)[-1]) for x in places] for places in lists] == [[0.0, 1.0, 2.0, 3.0]] * 2
        x = torch.arange(3000.0)
        me.group.allreduce_coalesced([x[:2000], x[1000:]]).wait()
        assert torch.equal(me.read(x), 2 * torch.arange(3000.0))

    with ranks(2) as group:
        on_all(group, program)


def test_parts_of_any_sizes_are_exchanged() -> None:
    def program(me: Rank) -> None:
        n, rank = me.world_size, me.rank
        rows = torch.arange(n * (n + 1) // 2 * 5000.0).view(-1, 5000)  # r + 1 rows for rank r
        into = torch.zeros((rank + 1) * n, 5000)
        me.group.all_to_all_single(into, rows, [rank + 1] * n, list(range(1, n + 1))).wait()
        start = rank * (rank + 1) // 2
        assert torch.equal(me.read(into), rows[start : start + rank + 1].repeat(n, 1))

    with ranks(3) as group:
        on_all(group, program)


def test_compressed_collectives_get_whole_tensors_and_give_the_bits_of_the_cpu() -> None:
    tensors = [("a", (2000,)), ("b", (30, 100))]

    def program(me: Rank) -> None:
        context, engine = me.group.context, me.group.engines["cpu"]
        here, there = GradientCompressor("int8"), GradientCompressor("int8")
        for step in range(2):  # the second with what the first has kept
            given = torch.randn(5000, generator=torch.Generator().manual_seed(10 * step + me.rank))
            x = me.late(torch.zeros(5000), given)
            call = Call(_all_reduce(here, tensors, context), [x], [x], ReduceOp.MEAN)
            work = engine.issue([call], 20.0, is_async=bool(step))
            work.wait()
            expected = context.all_reduce_compressed(given.clone(), ReduceOp.MEAN, there, tensors)
            assert torch.equal(me.read(x), expected)
        for is_async in (False, True):
            given = torch.randn(3000, generator=torch.Generator().manual_seed(me.rank))
            x, part, expected = me.late(torch.zeros(3000), given), torch.zeros(1000), torch.zeros(1000)
            call = Call(_reduce_scatter(here, "p", context), [x], [part], ReduceOp.SUM)
            engine.issue([call], 20.0, is_async=is_async).wait()
            context.reduce_scatter_compressed(given, expected, ReduceOp.SUM, there, name="p")
            assert torch.equal(me.read(part), expected)

    with ranks(3) as group:
        on_all(group, program)


def test_a_view_of_a_tensor_without_memory_is_refused() -> None:
    with pytest.raises(UnsupportedArrayError, match="must be dense, with memory"):
        staged_view(torch.ones(2, device="meta"))
    x = torch.ones(2)
    assert staged_view(x).finish() is x


def test_what_is_not_contiguous_or_not_known_is_moved_all_the_same() -> None:
    def program(me: Rank) -> None:
        whole = torch.zeros(40, 100)
        x = whole.t()[::2]
        x += me.rank + 1
        me.group.allreduce([x]).wait()
        assert torch.equal(me.read(whole).t()[::2], torch.full((50, 40), 3.0))
        assert not whole.t()[1::2].any()
        small = torch.full((3000,), me.rank + 1.0).to(torch.float8_e4m3fn)
        me.group.broadcast([small], options("Broadcast", rootRank=1)).wait()
        assert me.read(small).float().unique().tolist() == [2.0]

    with ranks(2) as group:
        on_all(group, program)


def test_messages_cross_between_devices_and_hosts() -> None:
    def program(me: Rank) -> None:
        group, count = me.group, 9000
        if me.rank == 0:
            sent = me.late(torch.zeros(count), torch.arange(float(count)))
            into = torch.zeros(count)
            received = group.recv([into], 1, 3)
            group.send([sent], 1, 3).wait()
            received.wait()
            assert torch.equal(me.read(into), torch.arange(float(count)) * 2)
            assert received.source_rank() == 1
            any_one = group.recv_anysource([into], 4)
            any_one.wait()
            assert (any_one.source_rank(), float(me.read(into)[0])) == (1, 7.0)
            return
        memory = torch.zeros(count)  # of the host, as on a machine without a GPU
        me.backend.recv(memory.numpy(), 0, tag=3)
        me.backend.send((memory * 2).numpy(), 0, tag=3)
        group.send([torch.full((count,), 7.0)], 0, 4).wait()

    with ranks(2) as group:
        on_all(group, program)


def test_whole_tensors_are_exchanged_with_ranks_that_have_them_in_the_hosts_memory() -> None:
    def program(me: Rank) -> None:
        x = torch.full((30_000,), me.rank + 1.0)
        if me.rank == 0:
            me.group.allreduce([x]).wait()
            x = me.read(x)
        else:
            me.group.context.all_reduce(x)
        assert x.unique().tolist() == [3.0]

    with ranks(2, chunk_bytes=0) as group:
        on_all(group, program)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_call_returns_at_once_and_its_wait_when_the_others_have_come() -> None:
    """Rank 1 comes only when rank 0 has issued everything."""
    issued = threading.Event()

    def program(me: Rank) -> None:
        if me.rank == 1:
            assert issued.wait(20)
        tensors = [torch.full((6000,), float(turn)) for turn in range(4)]
        works = [me.group.allreduce([x]) for x in tensors]
        if me.rank == 0:
            assert not any(work.is_completed() for work in works)
            issued.set()
        for turn, (x, work) in enumerate(zip(tensors, works, strict=True)):
            work.wait()
            assert me.read(x).unique().tolist() == [2.0 * turn]

    with ranks(2) as group:
        on_all(group, program)


def test_what_the_caller_does_after_a_call_does_not_hold_it_up() -> None:
    """Nor what it does before another call: else a kernel that waits for other ranks could wait for this one."""

    def program(me: Rank) -> None:
        first, second = torch.ones(30_000), torch.ones(30_000)
        go = threading.Event()
        begun = me.group.allreduce([first])
        me.device.current().put(lambda: go.wait(20))  # a kernel that takes its time
        later = me.group.allreduce([second])
        begun._work.wait()
        begun._ended().synchronize()
        assert not go.is_set()
        go.set()
        for x, work in ((first, begun), (second, later)):
            work.wait()
            assert me.read(x).unique().tolist() == [2.0]

    with ranks(2) as group:
        on_all(group, program)


def test_other_streams_than_the_first_are_waited_for_and_wait() -> None:
    def program(me: Rank) -> None:
        for turn in range(5):
            me.device.use(me.device.stream())
            x = me.late(torch.zeros(20_000), torch.full((20_000,), turn + me.rank * 10.0))
            work = me.group.allreduce([x])
            me.device.use(me.device.stream())  # who waits is who uses it
            work.wait()
            assert me.read(x).unique().tolist() == [2 * turn + 10.0]

    with ranks(2) as group:
        on_all(group, program)


def test_many_calls_are_under_way_at_once() -> None:
    def program(me: Rank) -> None:
        tensors = [torch.full((5000,), float(turn)) for turn in range(20)]
        works = [me.group.allreduce([x]) for x in tensors]
        for work in works:
            work.wait()
        assert [float(me.read(x).unique()) for x in tensors] == [2.0 * turn for turn in range(20)]
        assert all(work.is_completed() and work.is_success() for work in works)
        assert len(me.stage._buffers) == staging.BUFFERS

    with ranks(2) as group:
        on_all(group, program)


def test_memory_is_kept_for_both_streams_and_a_future_gives_the_tensors() -> None:
    def program(me: Rank) -> None:
        x = torch.ones(5000)
        work = me.group.allreduce([x])
        for stream in (me.stage.down, me.stage.up):
            assert any(kept.data_ptr() == x.data_ptr() and where is stream for kept, where in me.device.kept)
        (result,) = work.get_future().wait()
        assert result is x
        assert me.read(x).unique().tolist() == [2.0]

    with ranks(2) as group:
        on_all(group, program)


@pytest.mark.parametrize("how", ["at once", "wait", "future"])
def test_to_wait_for_the_own_gpu_is_no_exchange(how: str) -> None:
    """Those who watch must not take a slow GPU for a slow network."""
    computing = 0.2

    def program(me: Rank) -> None:
        me.group.barrier().wait()
        me.device.current().put(lambda: time.sleep(computing))  # a kernel
        work = me.group.allreduce([torch.ones(5000)], options("Allreduce", asyncOp=how != "at once"))
        work.get_future().wait() if how == "future" else work.wait()

    with ranks(2) as group:
        own_trace().restart_step()
        on_all(group, program)
        spent = own_trace().time.take()
    assert spent.seconds > computing
    assert spent.exchange < computing / 2


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_lost_peer_reaches_whoever_waits() -> None:
    def program(me: Rank) -> None:
        x = torch.ones(6000)
        me.group.allreduce([x]).wait()
        me.device.synchronize()
        if me.rank == 1:
            me.backend.kill()
            return
        work = me.group.allreduce([x])
        with pytest.raises(PeerLostError, match="Lost rank 1"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(RuntimeError, match="Lost rank 1"):
            work.get_future().wait()
        with pytest.raises(PeerLostError, match="Lost rank 1"):
            me.group.allreduce([x]).wait()

    with ranks(2) as group:
        on_all(group, program)


def test_after_an_error_nothing_is_written_behind_the_callers_back() -> None:
    """Some chunks of a result were on their way up when the other rank was lost."""
    chunks = 8

    def program(me: Rank) -> None:
        x = torch.ones(chunks * 1024)
        if me.rank == 1:
            copy, left = me.device.copy, [chunks // 2]

            def copy_until_half(stream: Any, into: torch.Tensor, source: torch.Tensor) -> None:
                if stream is me.stage.up:
                    left[0] -= 1
                    if left[0] < 0:
                        me.backend.kill()
                copy(stream, into, source)

            me.device.copy = copy_until_half
            with pytest.raises(DistributedError):
                me.group.allreduce([x]).wait()
            return
        with pytest.raises(PeerLostError, match="Lost rank 1"):
            me.group.allreduce([x]).wait()
        me.late(x, torch.full_like(x, 7.0))
        assert me.read(x).unique().tolist() == [7.0]

    with ranks(2) as group:
        on_all(group, program)


def test_a_peer_that_does_not_come_ends_with_the_groups_timeout() -> None:
    def program(me: Rank) -> None:
        if me.rank == 0:
            with pytest.raises(OperationTimeoutError, match="rank 1"):
                me.group.allreduce([torch.ones(3)]).wait()

    with ranks(2, timeout=0.3) as group:
        on_all(group, program)


def test_a_wait_may_give_up_earlier_and_try_again() -> None:
    waited = threading.Event()

    def program(me: Rank) -> None:
        x = torch.ones(3)
        if me.rank == 1:
            assert waited.wait(20)
            me.group.allreduce([x]).wait()
            return
        work = me.group.allreduce([x])
        with pytest.raises(OperationTimeoutError, match="the operation continues"):
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
                me.group.allreduce([x]).wait()

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
        work = me.group.allreduce([x])
        with pytest.raises(RuntimeError, match="out of memory"):
            work.wait()
        assert isinstance(work.exception(), RuntimeError)

    with ranks(2) as group:
        on_all(group, program)


def test_wrong_arguments_are_refused_at_the_call_and_the_group_goes_on() -> None:
    def program(me: Rank) -> None:
        group, x = me.group, torch.ones(4)
        with pytest.raises(InvalidArgumentError, match="must have one tensor for each of 2 ranks"):
            group.allgather([[x]], [x])
        with pytest.raises(InvalidArgumentError, match=r"output\[1\].*must match"):
            group.allgather([[torch.ones(4), torch.ones(5)]], [x])
        with pytest.raises(InvalidArgumentError, match="must have a multiple of 2 elements"):
            group.reduce_scatter_single(x, torch.ones(5))
        with pytest.raises(InvalidArgumentError, match="must be dense"):
            group.allreduce([x.to_sparse()])
        with pytest.raises(InvalidArgumentError, match="BAND"):
            group.allreduce([x], options("Allreduce", reduceOp=dist.ReduceOp.BAND))
        with pytest.raises(InvalidArgumentError, match="root"):
            group.broadcast([x], options("Broadcast", rootRank=7))
        with pytest.raises(InvalidArgumentError, match="at least one"):
            group.allreduce([])
        group.allreduce([x]).wait()
        assert me.read(x).tolist() == [2.0] * 4

    with ranks(2) as group:
        on_all(group, program)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_the_stream_wait_that_was_removed_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RINGFORT_CUDA_WAIT", "stream")
    staging.warn_about_stream_wait.cache_clear()

    def program(me: Rank) -> None:
        x = torch.ones(4)
        me.group.allreduce([x]).wait()
        assert me.read(x).tolist() == [2.0] * 4

    with ranks(2) as group:
        assert len({me.stage for me in group}) == 2
        on_all(group, program)
    staging.warn_about_stream_wait.cache_clear()
    (words,) = [record.getMessage() for record in caplog.records]
    assert "RINGFORT_CUDA_WAIT=stream is ignored" in words
    assert "deadlock" in words
