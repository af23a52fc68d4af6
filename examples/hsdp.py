"""HSDP: each machine has a replica, sharded over its ranks. Gather within a machine, average across machines.

    ringfort run -n 4 examples/hsdp.py                       # one machine as if it were two
    ringfort run -n 2 --nodes 2 examples/hsdp.py             # on each of two machines

From https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from language import Text, Transformer, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shards", type=int, default=2, help="ranks that share one copy of the weights")
    options = parser.parse_args()

    dist.init_process_group("ringfort")  # the line that differs; before: dist.init_process_group("gloo")

    torch.manual_seed(0)
    text = Text()
    loader = DataLoader(text, batch_size=16, sampler=DistributedSampler(text))
    model = Transformer(len(text.characters))
    copies, left_over = divmod(dist.get_world_size(), max(1, options.shards))
    if left_over or not copies:
        raise SystemExit(f"{dist.get_world_size()} ranks are no multiple of {options.shards} shards: try -n 4")
    mesh = init_device_mesh("cpu", (copies, options.shards), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step, (inputs, targets) in zip(range(1, options.steps + 1), loader, strict=False):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
