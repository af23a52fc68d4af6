"""`NcclBackend`: unavailable in words where there is no GPU; with one, its collectives on tensors that stay there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from ringfort import (
    Backend,
    BackendUnavailableError,
    DistributedConfig,
    DistributedContext,
    HybridBackend,
    InvalidArgumentError,
    NcclBackend,
    ReduceOp,
    TcpBackend,
)
from ringfort.testing import ALL_CHECKS, Check
from ringfort.testing.groups import closing_all, passing_credentials, reserved_addresses
from ringfort.testing.ranks import results, run_ranks

torch: Any = pytest.importorskip("torch")

from ringfort.torch import gpu_all_reduce, gpu_broadcast  # noqa: E402  # which need torch

with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

if torch.cuda.is_available():
    # When it is first used NCCL opens two sockets that it keeps as long as the process lives: before leaks are counted.
    with DistributedContext(NcclBackend(0, 1)) as _context:
        _context.all_reduce(torch.zeros(1, device="cuda"))


@contextmanager
def nccl_group(world_size: int, config: DistributedConfig) -> Iterator[Sequence[Backend]]:
    credentials = passing_credentials()
    with reserved_addresses(1) as (master,):

        def connect(rank: int) -> NcclBackend:
            return NcclBackend(rank, world_size, master, config=config, credentials=credentials)

        with closing_all(results(run_ranks(range(world_size), connect))) as backends:
            yield backends


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing() -> None:
    with pytest.raises(BackendUnavailableError, match="nccl is not available here: it needs an NVIDIA GPU") as caught:
        NcclBackend(0, 1)
    assert isinstance(caught.value, ImportError)


@with_gpu
@pytest.mark.parametrize("check", ALL_CHECKS.values(), ids=ALL_CHECKS)
def test_it_passes_the_checks(check: Check) -> None:
    """A world of one, and larger ones with arrays of the CPU: NCCL takes a GPU for each rank."""
    check.run(nccl_group)


@with_gpu
@pytest.mark.parametrize("kind", [NcclBackend, HybridBackend])
def test_a_world_of_one_refuses_what_larger_ones_do(kind: type[NcclBackend] | type[HybridBackend]) -> None:
    with DistributedContext(kind(0, 1)) as context:
        x = torch.ones(3, device="cuda")
        for wrong in (
            lambda: context.all_reduce(x, ReduceOp.BAND),
            lambda: context.all_reduce(x, timeout=-1),
            lambda: context.all_reduce(x.to_sparse()),
            lambda: context.broadcast(x, root=1),
            lambda: context.broadcast(x, timeout=0),
            lambda: context.reduce_scatter(torch.ones(2, 3, device="cuda")),
            lambda: context.all_to_all(torch.ones(2, 3, device="cuda")),
            lambda: context.send(x, 0),
            lambda: gpu_all_reduce(context, x, ReduceOp.BAND),
            lambda: gpu_all_reduce(context, x, timeout=-1),
            lambda: gpu_broadcast(context, x, root=1),
            lambda: gpu_broadcast(context, x.cpu()),
        ):
            with pytest.raises(InvalidArgumentError):
                wrong()
        assert context.all_reduce(x) is x


@with_gpu
@pytest.mark.parametrize("kind", [NcclBackend, HybridBackend])
def test_what_runs_in_another_thread_uses_the_callers_stream(kind: type[NcclBackend] | type[HybridBackend]) -> None:
    with DistributedContext(kind(0, 1)) as context:
        x = torch.empty(1_000_000, device="cuda")
        for turn in range(20):
            with torch.cuda.stream(torch.cuda.Stream()):
                x.fill_(-1.0)
                torch.cuda._sleep(10_000_000)
                x.fill_(float(turn))
                context.all_reduce(x, ReduceOp.premul_sum(2.0), async_op=True).wait()
                assert x.unique().tolist() == [2.0 * turn]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("call", [gpu_all_reduce, gpu_broadcast])
def test_tensors_on_gpus_need_a_gpu(call: Any) -> None:
    words = "CUDA is not available here: it needs an NVIDIA GPU"
    with DistributedContext(TcpBackend(0, 1)) as context, pytest.raises(BackendUnavailableError, match=words):
        call(context, torch.ones(3))


@with_gpu
@pytest.mark.parametrize("kind", [NcclBackend, HybridBackend])
def test_tensors_on_the_gpu_stay_there(kind: type[NcclBackend] | type[HybridBackend]) -> None:
    with DistributedContext(kind(0, 1)) as context:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
            x = torch.arange(12, device="cuda").reshape(3, 4).to(dtype)
            kept = x.clone()
            assert context.all_reduce(x) is x
            assert context.all_reduce(x, ReduceOp.MEAN) is x
            assert torch.equal(x, kept)
            context.all_reduce(x, ReduceOp.premul_sum(3))
            assert torch.equal(x, 3 * kept)
            part = x[:, ::2]
            context.broadcast(part)
            assert torch.equal(part, 3 * kept[:, ::2])
            if kind is HybridBackend:
                continue
            assert torch.equal(context.all_gather(x), x[None])
            assert torch.equal(context.reduce_scatter(x[None]), x)
            assert torch.equal(context.all_to_all(x[None]), x[None])
            assert context.all_gather(x).device == x.device


@with_gpu
def test_arrays_of_the_cpu_go_our_way() -> None:
    with DistributedContext(NcclBackend(0, 1)) as context:
        x = torch.ones(3)
        assert context.all_reduce(x) is x
        assert x.device.type == "cpu"
