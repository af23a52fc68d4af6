"""What each member of `python -m benchmarks.elastic_training` runs: an ordinary program that trains a model.

It prints a line of JSON for each step. `--waits` holds it back, with everything loaded, until a line comes in.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import Any

import torch
from torch import nn

from benchmarks.elastic_training_models import MODELS, STEPS_PER_PASS, Task
from ringfort.config import AutoDiscoveryConfig
from ringfort.torch import elastic
from ringfort.training.elastic.state_check import leaves_of

SEED = 5


def say(**line: Any) -> None:
    """Print what the driver reads."""
    print(json.dumps(line), flush=True)


class Counted(nn.Module):
    """A model that counts the samples of all steps. The counts are buffers, so they are part of the run: how far a
    micro-batch moves them is averaged over the batch."""

    def __init__(self, inner: nn.Module, task: Task) -> None:
        super().__init__()
        self.inner = inner
        self._batch = task.batch
        self.register_buffer("seen", torch.zeros(len(task)))

    def forward(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.seen[index] += self._batch / len(index)
        return self.inner(x)


def main() -> None:
    """Take part until the run has ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--waits", action="store_true")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(given.threads)
    task = MODELS[given.model]()
    torch.manual_seed(1)
    model = Counted(task.model(), task)
    optimizer = task.optimizer(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=given.steps + 1, pct_start=0.1
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    say(ready=True, parameters=sum(parameter.numel() for parameter in model.parameters()))
    if given.waits:
        sys.stdin.readline()
    passes = dict[int, list[float]]()

    def on_step(gradients: dict[str, torch.Tensor], step: int) -> None:
        if step % STEPS_PER_PASS == 0:
            passes[step // STEPS_PER_PASS] = sorted(set(model.seen.tolist()))

    config = AutoDiscoveryConfig(interfaces=["127.0.0.1"])
    run = elastic(
        model, optimizer, batch=task.batch, scheduler=schedule, scaler=scaler, clip_norm=1.0, on_step=on_step,
        seed=SEED, nodes=given.nodes, name=f"training-{given.model}", patience=20, config=config,
    )  # fmt: skip
    with run:
        for index, x, y in run.loader(task, microbatch=task.microbatch, steps=given.steps):
            run.backward(task.loss(model(index, x), y))
            if run.step():
                say(step=run.number, loss=run.loss, members=len(run.members))
        digests = leaves_of("", run.state).digests
        say(done=run.number, passes=passes, state=str(hash(tuple(digests.values()))), scale=scaler.get_scale())


if __name__ == "__main__":
    main()
