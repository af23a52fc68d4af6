"""Elastic training with HSDP: a machine is a member, and its copy of the model is sharded over its ranks.

    ringfort run --elastic --nodes 1:4 -n 2 examples/elastic_hsdp.py      # on each machine, at any time

Kill a rank: its machine leaves the run, the others continue, and the launcher starts the machine's ranks again. All
machines end with the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
import torch.distributed as dist
from language import Text, Transformer, loss_of

import ringfort.torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", help="a folder on this machine")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds per micro-batch, to watch the run")
    options = parser.parse_args()

    dist.init_process_group("ringfort")  # the ranks of this machine alone
    torch.manual_seed(0)
    text = Text()
    model = ringfort.torch.shard(Transformer(len(text.characters)), "HYBRID_SHARD")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with ringfort.torch.elastic(model, optimizer, batch=32, clip_norm=1.0, checkpoint=options.checkpoint) as run:
        for inputs, targets in run.loader(text, microbatch=8, steps=options.steps):
            time.sleep(options.pause)
            run.backward(loss_of(model(inputs), targets))
            if run.step() and dist.get_rank() == 0:
                print(f"step {run.number} loss {run.loss:.6f}, {len(run.members)} members", flush=True)

    whole = [parameter.full_tensor().detach() for parameter in model.parameters()]  # every rank takes part in this
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in whole)).hexdigest()
    print(f"done at step {run.number}, weights {digest[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
