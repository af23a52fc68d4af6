"""`python -m tests.workers.walks join|torch`: walks through a call, and at rank 0 prints what it entered, as JSON."""

from __future__ import annotations

import json
import sys

import ringfort
from tests.helpers.walk import Walk


def join() -> tuple[Walk, int]:
    from ringfort.cluster import backend  # noqa: F401  # whose import is not part of the walk

    with Walk() as walk:
        context = ringfort.join(timeout=60)
    rank = context.rank
    context.barrier()
    context.close()
    return walk, rank


def torch() -> tuple[Walk, int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("ringfort")
    x = torch.ones(1000)
    for _ in range(3):  # the first one plans
        dist.all_reduce(x)
    walks: list[Walk] = []
    for _ in range(300):  # a peer that is late makes a rank wait longer, in modules that are entered for that alone
        with Walk() as walk:
            dist.all_reduce(x)
        walks.append(walk)
    rank, walk = dist.get_rank(), min(walks, key=lambda walk: len(walk.modules))
    dist.barrier()
    dist.destroy_process_group()
    return walk, rank


if __name__ == "__main__":
    found, rank = {"join": join, "torch": torch}[sys.argv[1]]()
    if rank == 0:
        print(json.dumps([found.modules, sorted(found.calls)]))
