"""Accelerate: it uses the group that exists, and makes one of its own only if there is none.

    ringfort run -n 2 examples/with_accelerate.py

From https://huggingface.co/docs/accelerate/basic_tutorials/migration
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from language import Text, Transformer, loss_of
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    dist.init_process_group("ringfort")  # the line that differs; before: none

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    text = Text()
    model = Transformer(len(text.characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(text, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, (inputs, targets) in zip(range(1, steps + 1), loader, strict=False):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print(f"step {step} loss {loss.item():.6f}", flush=True)

    accelerator.end_training()


if __name__ == "__main__":
    main()
