"""Ranks whose traces the test reads. Rank 0 computes slowly, and rank 1 has a slow data set."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import ringfort
from ringfort.config import AutoDiscoveryConfig
from ringfort.torch.training.run import elastic as elastic_run
from tests.torch.scenarios import group

STEPS = 8
COMPUTING = 0.05
LOADING = 0.01
"""Seconds for a batch."""
SAMPLES, BATCH, MICROBATCH = 64, 16, 4


class Rows(torch.utils.data.Dataset):
    """Samples that take some time to load."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return torch.full((4,), float(index))


class Slow(torch.nn.Module):
    """A model that computes for some time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 256)
        self._seconds = seconds

    def forward(self, x: Any) -> Any:
        time.sleep(self._seconds)
        return self.layer(x).mean()


def ddp(rank: int, world_size: int) -> None:
    """DistributedDataParallel with a DataLoader: torch waits for the gradients in C++."""
    with group(rank, world_size):
        model = DistributedDataParallel(Slow(0.0 if rank else COMPUTING))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        rows = torch.utils.data.DataLoader(Rows(LOADING / 8 if rank else 0.0), batch_size=8)
        for x in rows:
            loss = model(x)
            ringfort.log(loss=loss, samples=len(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def elastic(rank: int, world_size: int, folder: str) -> None:
    """`ringfort.torch.elastic`. The time that a model takes to compute includes that of the data set."""
    model = Slow(0.0 if rank else COMPUTING)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = elastic_run(
        model,
        optimizer,
        batch=BATCH,
        nodes="2:2",
        name="watched",
        config=AutoDiscoveryConfig(interfaces=["127.0.0.1"]),
        checkpoint=Path(folder, f"checkpoint-{rank}"),
    )
    with run:
        for x in run.loader(Rows(LOADING / MICROBATCH if rank else 0.0), microbatch=MICROBATCH, steps=STEPS):
            run.backward(model(x))
            if run.step():
                ringfort.log(loss=run.loss, name=rank)
