"""What the ranks do in tests of collectives that are issued in the callbacks of futures; see `scenarios`."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.torch.model_scenarios import losses, perceptron
from tests.torch.scenarios import group, raised


def nested(rank: int, world_size: int) -> None:
    """A collective in a callback: one, several deep, and from many futures at once while the program goes on."""
    with group(rank, world_size):
        for _ in range(20):
            x, y = torch.ones(4), torch.full((5,), 2.0)
            first = dist.all_reduce(x, async_op=True).get_future()
            last = first.then(lambda _, y=y: dist.all_reduce(y, async_op=True).get_future().wait()[0])
            assert last.wait()[0] == 2 * world_size

        def descend(levels: int) -> Any:
            future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
            return future if levels == 0 else future.then(lambda _: descend(levels - 1).wait())

        assert descend(8).wait()[0][0] == world_size
        for _ in range(5):
            _many_at_once(rank, world_size)


def _many_at_once(rank: int, n: int) -> None:
    futures: list[Any] = []
    for number in range(6):

        def spread(_: Any, number: int = number) -> torch.Tensor:
            x = torch.full((10,), float(number))  # the same size in each: only their order could tell them apart
            return dist.all_reduce(x, async_op=True).get_future().wait()[0]

        def again(future: Any, number: int = number) -> torch.Tensor:
            x = future.wait() + number
            dist.all_reduce(x)
            return x

        future = dist.all_reduce(torch.full((number + 1,), float(rank)), async_op=True).get_future()
        futures.append(future.then(spread).then(again))
        if number % 2 == rank % 2:  # so that some callbacks are added before the future is complete and some after
            time.sleep(0.001)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x[0] == n
    for number, future in enumerate(futures):
        assert future.wait()[0] == n * (n * number + number), (number, future.wait())


def nested_fails(rank: int, world_size: int) -> list[str]:
    """Rank 1 issues nothing in its callback: the other's wait ends with the timeout, and the group goes on."""
    with group(rank, world_size) as pg:
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        words: list[str] = []
        if rank == 0:
            pg.set_timeout(timedelta(seconds=0.2))
            chained = future.then(lambda _: dist.all_reduce(torch.ones(1), async_op=True).get_future().wait())
            words.append(str(raised(chained.wait)).partition("\n")[0])
            pg.set_timeout(timedelta(seconds=30))
        failing = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: 1 // 0)
        words.append(str(raised(failing.wait)).partition("\n")[0])
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x[0] == world_size
        return words


def power_sgd(rank: int, world_size: int, backend: str, batched: bool, megabytes: float) -> list[float]:
    """Losses of a model whose gradients go through torch's PowerSGD, in buckets of so many megabytes."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    with group(rank, world_size, backend):
        model = DistributedDataParallel(perceptron(), bucket_cap_mb=megabytes)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        if batched:  # torch 2.13 refuses the matrices of its own hook, for they are not in a batch of one
            given = powerSGD_hook._orthogonalize
            powerSGD_hook._orthogonalize = lambda x, epsilon=0: given(x if x.dim() == 3 else x.unsqueeze(0), epsilon)
        hook = powerSGD_hook.batched_powerSGD_hook if batched else powerSGD_hook.powerSGD_hook
        model.register_comm_hook(state, hook)
        return losses(model, rank, 6)
