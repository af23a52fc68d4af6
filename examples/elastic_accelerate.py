"""Accelerate with machines that come and go: start it on any number of machines, kill some, start them again.

    ringfort run --elastic --nodes 1:8 examples/elastic_accelerate.py      # on each machine, at any time
    python examples/elastic_accelerate.py --checkpoint run1                # or without a launcher

A small network learns the product of two numbers. `prepare` takes the place of `accelerator.prepare`; the loop is
Accelerate's own. All members end with the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import time

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from ringfort.integrations.accelerate import new_accelerator, prepare

SAMPLES, BATCH = 2000, 128


def product() -> TensorDataset:
    """Pairs of numbers, and their products."""
    x = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(7)) * 2 - 1
    return TensorDataset(x, x[:, :1] * x[:, 1:])


def network() -> nn.Module:
    """The same on every machine that starts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--checkpoint", help="a folder on this machine")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds per micro-batch, to watch the run")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    accelerator = new_accelerator()  # before: Accelerator(), which still works without a launcher
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=200)
    loader = DataLoader(product(), batch_size=32, shuffle=True)
    # The line that differs; before: accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = prepare(
        accelerator, model, optimizer, loader, scheduler,
        batch=BATCH, epochs=arguments.epochs, clip_norm=1.0, checkpoint=arguments.checkpoint,
    )  # fmt: skip

    for _ in range(arguments.epochs):
        for x, y in loader:
            time.sleep(arguments.pause)
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"step {loader.run.number}: loss {loader.run.loss:.6f}", flush=True)

    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
    print(f"done at step {loader.run.number}, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
