"""An ordinary torch program with one word changed: DistributedDataParallel over Ringfort, however it was started."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("ringfort", init_method=sys.argv[1] if len(sys.argv) > 1 else None)
    torch.manual_seed(0)
    inputs, weights = torch.randn(240, 4), torch.tensor([1.0, -2.0, 3.0, 0.5])
    targets = inputs @ weights
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(100):
        optimizer.zero_grad()
        loss = ((model(inputs[rank::world_size]).squeeze() - targets[rank::world_size]) ** 2).mean()
        loss.backward()
        optimizer.step()
    print(f"rank {rank} of {world_size} error {(model.module.weight.detach() - weights).abs().max():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
