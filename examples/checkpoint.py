"""Checkpoint and resume: every rank saves its own shards. Stop it or kill it, start it again, and it goes on.

    ringfort run -n 2 examples/checkpoint.py --folder /tmp/run1

On several machines the folder must be one that all of them see. Any number of ranks may resume: torch shards anew.
As https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html has it.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from language import Text, Transformer, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


class Training(Stateful):
    """All that has to be saved. `dcp.save` and `dcp.load` call the two methods."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]


def newest(folder: Path) -> Path | None:
    """The last checkpoint that is whole: torch writes `.metadata` when everything else is there."""
    whole = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(whole, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are and will be")
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    options = parser.parse_args()

    dist.init_process_group("ringfort")  # the line that differs; before: dist.init_process_group("gloo")

    torch.manual_seed(0)
    text = Text()
    loader = DataLoader(text, batch_size=16, sampler=DistributedSampler(text))
    model = Transformer(len(text.characters))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=3e-3))

    saved = newest(options.folder)
    if saved is not None:
        dcp.load({"training": training}, checkpoint_id=saved)
        if dist.get_rank() == 0:
            print(f"resumed after step {training.step}", flush=True)

    for inputs, targets in islice(loader, training.step, options.steps):
        training.optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        training.optimizer.step()
        training.step += 1
        if dist.get_rank() == 0:
            print(f"step {training.step} loss {loss.item():.6f}", flush=True)
        if training.step % options.save_every == 0:
            dcp.save({"training": training}, checkpoint_id=options.folder / f"step-{training.step}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
