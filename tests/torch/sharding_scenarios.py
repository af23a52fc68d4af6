"""What the ranks of the tests of `ringfort.torch.shard` do."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # which torch itself loads late, and every rank by itself
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.tensor import DTensor

from ringfort.torch import ShardingStrategy, shard
from ringfort.transport import machine
from tests.torch.scenarios import group, raised


def pretend_hosts(rank: int, per_host: int) -> None:
    """From here on this process says that it is on a machine with `per_host` ranks."""
    machine._machine_id = lambda: bytes([rank // per_host + 1]) * 16


def model() -> Any:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(64, 32),
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        torch.nn.Linear(32, 64),
    )


def train(wrapped: Any, parts: list[int], steps: int = 2) -> None:
    """Some steps on the batches of `parts`: of one rank, or of all together."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(steps):
        texts = []
        for part in parts:
            random = torch.Generator().manual_seed(100 * step + part)
            texts.append(torch.randint(0, 64, (4, 17), generator=random))
        text = torch.cat(texts)
        loss = torch.nn.functional.cross_entropy(wrapped(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(
    rank: int, world_size: int, strategies: list[str], per_host: int = 0
) -> list[tuple[float, float, list[list[int]]]]:
    """Trains with each strategy; returns how far that is from one process with all data, what share of the parameters
    this rank has, and the ranks of each copy."""
    if per_host:
        pretend_hosts(rank, per_host)
    with group(rank, world_size):
        alone = model()
        train(alone, list(range(world_size)))
        return [_trained(rank, strategy, alone) for strategy in strategies]


def _trained(rank: int, strategy: str, alone: Any) -> tuple[float, float, list[list[int]]]:
    sharded = shard(model(), strategy)
    total = sum(parameter.numel() for parameter in alone.parameters())
    local = sum(parameter.to_local().numel() for parameter in sharded.parameters())
    mesh = next(iter(sharded.parameters())).device_mesh
    train(sharded, [rank])
    state = sharded.state_dict()
    worst = max(float((whole(state[name]) - value).abs().max()) for name, value in alone.state_dict().items())
    held = sum(parameter.to_local().numel() for parameter in sharded.parameters())
    assert held == local, "what was gathered was not let go"
    rows = mesh.mesh.tolist()
    return worst, local / total, rows if mesh.ndim == 2 else [rows]


def over_gloo(rank: int, world_size: int) -> list[list[int]]:
    """Hosts are found out where the default group is another's, too; and nothing is unpickled for it."""
    pretend_hosts(rank, 2)
    dist.distributed_c10d._tensor_to_object = None  # the one function of torch's object collectives that unpickles
    with group(rank, world_size, "gloo"):
        sharded = shard(model(), ShardingStrategy.HYBRID_SHARD)
        return next(iter(sharded.parameters())).device_mesh.mesh.tolist()


def refused(rank: int, world_size: int) -> list[str]:
    """What cannot be is refused in words; then the group goes on."""
    pretend_hosts(rank, 2)  # of three ranks: two and one
    said = [str(raised(lambda: shard(model())))]
    with group(rank, world_size):
        wrong = (
            lambda: shard(model(), "HYBRID_SHARD"),
            lambda: shard(model(), ShardingStrategy.hybrid_shard(2)),
            lambda: shard(model(), "ZERO"),
            lambda: shard(model(), "FULL_SHARD(2)"),
            lambda: shard(model(), units=[torch.nn.Conv2d]),
            lambda: shard(torch.nn.ReLU()),
            lambda: shard("model"),
            lambda: shard(model(), prefetch=-1),
            lambda: shard(model(), mesh=None),
            lambda: ShardingStrategy.hybrid_shard(0),
        )
        said += [str(raised(action)) for action in wrong]
        dist.barrier()
        shard(model(), units=[torch.nn.TransformerEncoderLayer], prefetch=2)
    return said
