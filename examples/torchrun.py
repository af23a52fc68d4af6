"""torchrun without an address: the machines find each other, and if a worker dies, all continue from a snapshot.

    torchrun --nnodes=2 --rdzv-backend=ringfort --rdzv-id=run1 --max-restarts=3 examples/torchrun.py --snapshot run1.pt

Type it on each of two machines, in a folder that both share.
From https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from language import Text, Transformer, loss_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--snapshot", type=Path, required=True, help="the file to go on from")
    parser.add_argument("--save-every", type=int, default=20, help="steps from one snapshot to the next")
    options = parser.parse_args()

    dist.init_process_group("ringfort")  # the line that differs; before: dist.init_process_group("gloo")

    torch.manual_seed(0)
    text = Text()
    loader = DataLoader(text, batch_size=16, sampler=DistributedSampler(text))
    model = Transformer(len(text.characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    done = 0
    if options.snapshot.exists():
        snapshot = torch.load(options.snapshot, weights_only=True)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        done = snapshot["step"]
        if dist.get_rank() == 0:
            print(f"resumed after step {done}", flush=True)
    ddp = DistributedDataParallel(model)

    for step, (inputs, targets) in enumerate(islice(loader, done, options.steps), done + 1):
        optimizer.zero_grad()
        loss = loss_of(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
            if step % options.save_every == 0:
                # First under another name: a worker that dies while it writes must not damage the last snapshot.
                fresh = options.snapshot.with_suffix(".new")
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, fresh)
                fresh.replace(options.snapshot)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
