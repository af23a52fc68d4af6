"""DistributedDataParallel: each rank has the whole model and a share of the data; gradients are averaged.

    ringfort run -n 2 examples/ddp.py

From https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from language import Text, Transformer, loss_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    dist.init_process_group("ringfort")  # the line that differs; before: dist.init_process_group("gloo")

    torch.manual_seed(0)
    text = Text()
    loader = DataLoader(text, batch_size=16, sampler=DistributedSampler(text))
    model = DistributedDataParallel(Transformer(len(text.characters)))
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
