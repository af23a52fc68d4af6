"""A pipeline: each of two ranks has half of the layers, and micro-batches pass through them one after the other.

    ringfort run -n 2 examples/pipeline.py

From https://docs.pytorch.org/tutorials/intermediate/pipelining_tutorial.html
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from language import Text, Transformer, loss_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    dist.init_process_group("ringfort")  # the line that differs; before: dist.init_process_group("gloo")

    if dist.get_world_size() != 2:
        raise SystemExit("this pipeline has two halves: start it with -n 2")
    torch.manual_seed(0)
    rank = dist.get_rank()
    text = Text()
    # Both ranks draw the same batches: the first needs the inputs, the last the targets.
    loader = DataLoader(text, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    model = Transformer(len(text.characters))
    if rank == 0:
        del model.layers[1:]
        model.output = nn.Identity()
    else:
        del model.layers[:1]
        model.embedding = nn.Identity()
    stage = PipelineStage(model, rank, num_stages=2, device=torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step, (inputs, targets) in zip(range(1, steps + 1), loader, strict=False):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=targets, losses=losses)
            print(f"step {step} loss {torch.stack(losses).mean().item():.6f}", flush=True)
        optimizer.step()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
