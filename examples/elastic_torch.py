"""Elastic training with torch: start it on any number of machines, kill some, start them again.

    ringfort run --elastic --nodes 1:8 examples/elastic_torch.py      # on each machine, at any time
    python examples/elastic_torch.py --checkpoint run1                # or without a launcher

A small network learns the product of two numbers. All members end with the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import time

import torch
from torch import nn

import ringfort.torch

SAMPLES = 4_096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--checkpoint", help="a folder on this machine")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds per micro-batch, to watch the run")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    torch.manual_seed(0)  # the same data and the same first weights on every machine that starts
    x = torch.rand(SAMPLES, 2) * 2 - 1
    dataset = torch.utils.data.TensorDataset(x, x.prod(1, keepdim=True))
    model = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.05), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs * SAMPLES // 256)

    run = ringfort.torch.elastic(
        model, optimizer, batch=256, scheduler=scheduler, clip_norm=1.0, checkpoint=arguments.checkpoint
    )
    for inputs, targets in run.loader(dataset, microbatch=32, epochs=arguments.epochs):
        time.sleep(arguments.pause)
        run.backward(nn.functional.mse_loss(model(inputs), targets))
        if run.step() and run.number % 50 == 0:
            print(f"step {run.number}: loss {run.loss:.5f}, {len(run.members)} members", flush=True)

    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    print(f"done at step {run.number}, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
