"""FSDP2: each rank keeps a shard of the weights, gradients and optimizer state, and gathers a layer when it is used.

    ringfort run -n 2 examples/fsdp2.py

From https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html
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
    steps = parser.parse_args().steps

    dist.init_process_group("ringfort")  # the line that differs; before: dist.init_process_group("gloo")

    torch.manual_seed(0)
    text = Text()
    loader = DataLoader(text, batch_size=16, sampler=DistributedSampler(text))
    model = Transformer(len(text.characters))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step, (inputs, targets) in zip(range(1, steps + 1), loader, strict=False):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
