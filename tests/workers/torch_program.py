"""An ordinary torch program, as one would start it with torchrun: DistributedDataParallel over Gloo, no Ringfort."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
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
    print("error", f"{(model.module.weight.detach() - weights).abs().max():.6f}", flush=True)
    dist.destroy_process_group()
    # Not through the end of the interpreter: on a busy machine 2 of 180 processes with this program and Gloo aborted
    # there ("terminate called without an active exception", torch 2.13), started by hand, without `ringfort run`.
    os._exit(0)


if __name__ == "__main__":
    main()
