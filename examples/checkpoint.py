"""Checkpoint and resume: each rank saves its own shards. Stop or kill the run, start it again, and it continues.

    ringfort run -n 2 examples/checkpoint.py --folder /tmp/run1

Several machines must share the folder; the example checks that at the start. Without a shared folder use `--rank0`:
rank 0 collects the whole state, writes it into its own folder, and sends it to the others at the next start.

    ringfort run --nodes 2 examples/checkpoint.py --rank0 --folder run1

Any number of ranks can resume: torch shards the state again.
From https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html
"""

from __future__ import annotations

import argparse
import platform
import secrets
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from language import Text, Transformer, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


class Training(Stateful):
    """Everything that has to be saved. `dcp.save` and `dcp.load` call the two methods."""

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


class Sharded:
    """Each rank writes and reads its own shards, in a folder that all ranks share."""

    def __init__(self, folder: Path, training: Training) -> None:
        self.folder = folder
        self.training = training
        require_shared(folder)

    def save(self) -> None:
        dcp.save({"training": self.training}, checkpoint_id=self.folder / f"step-{self.training.step}")

    def resume(self) -> bool:
        # Torch writes `.metadata` last: a checkpoint without it is incomplete.
        whole = [path.parent for path in self.folder.glob("step-*/.metadata")]
        if whole:
            dcp.load({"training": self.training}, checkpoint_id=max(whole, key=step_of))
        return bool(whole)


class AtRank0:
    """Rank 0 writes the files. The whole state goes over the network to and from it, tensor by tensor."""

    def __init__(self, folder: Path, training: Training) -> None:
        self.folder = folder
        self.training = training
        folder.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # rank 0 gets everything, the others nothing
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer, options=options)
        if dist.get_rank() == 0:
            path = self.folder / f"step-{self.training.step}.pt"
            part = path.with_suffix(".part")
            torch.save({"model": model, "optimizer": optimizer, "step": self.training.step}, part)
            part.rename(path)  # a checkpoint exists as a whole or not at all

    def resume(self) -> bool:
        path = max(self.folder.glob("step-*.pt"), key=step_of, default=None)
        steps = [0] * dist.get_world_size()
        dist.all_gather_object(steps, 0 if path is None else step_of(path))
        owner = steps.index(max(steps))
        if not steps[owner]:
            return False
        saved: dict[str, Any] = {"model": {}, "optimizer": {}}
        if path is not None and dist.get_rank() == owner:
            saved = torch.load(path, weights_only=True)
        if owner != 0:  # another machine was rank 0 at that time
            box = [saved]
            dist.broadcast_object_list(box, src=owner)
            saved = box[0] if dist.get_rank() == 0 else {"model": {}, "optimizer": {}}
        model, optimizer = self.training.model, self.training.optimizer
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        # In two calls: `set_state_dict` takes the empty dictionaries of the other ranks for "no model".
        set_model_state_dict(model, saved["model"], options=options)
        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=options)
        self.training.step = steps[owner]
        return True


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def require_shared(folder: Path) -> None:
    """Exit on all ranks if one of them does not see what rank 0 writes: each machine would keep only a part of the
    checkpoint, and none could load it."""
    folder.mkdir(parents=True, exist_ok=True)
    name = [f".shared-{secrets.token_hex(8)}"]
    dist.broadcast_object_list(name, src=0)
    if dist.get_rank() == 0:
        (folder / name[0]).touch()
    dist.barrier()
    seen: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, "" if (folder / name[0]).exists() else f"rank {dist.get_rank()} on {platform.node()}")
    if dist.get_rank() == 0:
        (folder / name[0]).unlink()
    without = [who for who in seen if who]
    if without:
        dist.destroy_process_group()
        raise SystemExit(
            f"{folder} is not one folder for all ranks: {', '.join(without)} does not see what rank 0 writes.\n"
            "Name a folder that all machines share, or use --rank0: then rank 0 alone writes checkpoints."
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are and will be")
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--rank0", action="store_true", help="rank 0 writes all of it: no shared folder is needed")
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
    checkpoints = (AtRank0 if options.rank0 else Sharded)(options.folder, training)

    if checkpoints.resume() and dist.get_rank() == 0:
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
            checkpoints.save()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
