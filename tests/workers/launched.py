"""A program that another launcher starts: `srun` or `mpiexec`, Ray, Dask: `python -m tests.workers.launched HOW [...]`.

It prints lines of JSON: what this process knows of its place, and what it has computed with the others.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import ringfort
from ringfort.config import Environment
from ringfort.identity.keypair import NodeIdentity
from tests.workers.elastic import DATA, fresh, gradient, update

TIMEOUT = 100.0


def say(**what: Any) -> None:
    """Print a line at once: lines of several processes must not mix."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def digest(state: dict[str, Any]) -> str:
    """Return a hash of the state of an elastic run: `srun` cuts lines of more than a kilobyte."""
    return sha256(state["w"].tobytes() + state["seen"].tobytes()).hexdigest()[:16]


def meet(seconds: str = "0") -> None:
    """Form a group, compute something, and stay for a while."""
    with ringfort.init(timeout=TIMEOUT) as context:
        total = context.all_reduce(np.full(1000, 2.0**context.rank))
        time.sleep(float(seconds))
        context.barrier()
        say(
            rank=context.rank,
            size=context.world_size,
            local=Environment.from_mapping().local_rank,
            total=float(total[0]),
            hosts=list(context.group.hosts),
            host=platform.node(),
            node=NodeIdentity.load_or_generate().peer_id,
            encrypted=context.config.encryption,
        )


def torch_group(url: str = "ringfort://") -> None:
    """Train a step of a model under DDP."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("ringfort", init_method=url)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.full((2, 3), float(rank))).sum().backward()
    slope = model.module.weight.grad[0, 0].item()
    say(rank=rank, size=size, slope=slope, host=platform.node())
    dist.destroy_process_group()


def take_part(total: str, nodes: str, pause: str = "0.01", folder: str = "") -> None:
    """Take part in an elastic run of whole numbers, whose result is known. The file `hurry` in `folder` ends pauses."""
    state = fresh()
    members = list[int]()
    with ringfort.elastic(state, nodes=nodes, name="launched", patience=5.0) as run:
        for step in run.steps(
            int(total), samples=DATA.samples, batch=DATA.batch, microbatch=DATA.microbatch, seed=DATA.seed
        ):
            for part in step:
                if not (folder and Path(folder, "hurry").exists()):
                    time.sleep(float(pause))
                step.add(gradient(part))
            update(state, step.mean())
            members.append(len(run.members))
            if folder:
                name = f"{platform.node()}-{NodeIdentity.load_or_generate().peer_id}"
                Path(folder, name).write_text(f"{step.number} {len(run.members)}")
    say(done=run.step, state=digest(state), members=sorted(set(members)))


if __name__ == "__main__":
    {"meet": meet, "torch": torch_group, "elastic": take_part}[sys.argv[1]](*sys.argv[2:])
