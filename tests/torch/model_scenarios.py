"""Small models through what torch builds on a process group: the ranks of tests; see `scenarios`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.torch.scenarios import group


def perceptron() -> torch.nn.Module:
    """The same at every rank. With a normalisation, so that there are buffers to keep alike as well."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 64)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(64, 8))


def losses(model: Any, rank: int, steps: int) -> list[float]:
    """Of so many steps, each rank on numbers of its own."""
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 32)).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def compiled(rank: int, world_size: int, backend: str, compiler: str) -> list[list[float]]:
    """Compiled inside DistributedDataParallel and around it."""
    with group(rank, world_size, backend):
        inside = DistributedDataParallel(torch.compile(perceptron(), backend=compiler))
        around = torch.compile(DistributedDataParallel(perceptron()), backend=compiler)
        return [losses(model, rank, 4) for model in (inside, around)]


def fsdp1(rank: int, world_size: int, backend: str) -> list[float]:
    """FullyShardedDataParallel, which frees parameters by resizing their storage."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import always_wrap_policy

    with group(rank, world_size, backend):
        whole = FullyShardedDataParallel(
            perceptron(), auto_wrap_policy=always_wrap_policy, device_id=torch.device("cpu")
        )
        return losses(whole, rank, 6)


def sharded_tensor(rank: int, world_size: int) -> float | None:
    """Torch makes the tensors of this gather itself, on the device that it takes for the backend's."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    with group(rank, world_size):
        places: list[Any] = [f"rank:{other}/cpu" for other in range(world_size)]
        found = torch.zeros(10, 5) if rank == 0 else None
        sharded_tensor.ones(ChunkShardingSpec(dim=0, placements=places), 10, 5).gather(0, found)
        return None if found is None else found.sum().item()
