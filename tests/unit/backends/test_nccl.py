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
    NcclBackend,
    ReduceOp,
)
from ringfort.testing import ALL_CHECKS, Check
from ringfort.testing.groups import closing_all

torch: Any = pytest.importorskip("torch")
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

if torch.cuda.is_available():
    # When it is first used NCCL opens two sockets that it keeps as long as the process lives: before leaks are counted.
    with DistributedContext(NcclBackend(0, 1)) as _context:
        _context.all_reduce(torch.zeros(1, device="cuda"))

OF_ONE = {name: check for name, check in ALL_CHECKS.items() if check.ranks == 1}


@contextmanager
def nccl_group(world_size: int, config: DistributedConfig) -> Iterator[Sequence[Backend]]:
    with closing_all([NcclBackend(0, world_size, config=config)]) as backends:
        yield backends


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing() -> None:
    with pytest.raises(BackendUnavailableError, match="nccl is not available here: it needs an NVIDIA GPU") as caught:
        NcclBackend(0, 1)
    assert isinstance(caught.value, ImportError)


@with_gpu
@pytest.mark.parametrize("check", OF_ONE.values(), ids=OF_ONE)
def test_a_world_of_one_passes_the_checks(check: Check) -> None:
    check.run(nccl_group)


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
