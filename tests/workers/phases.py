"""Ranks whose traces the test reads: `python -m tests.workers.phases context|elastic FOLDER`.

One of them computes slowly, the other has a slow loader. They end without their cleanup, so that the traces stay.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import ringfort
from ringfort.config import AutoDiscoveryConfig
from ringfort.training import average_gradients

STEPS = 8
COMPUTING = 0.05
"""Seconds that rank 0 computes in a step, and rank 1 does not."""
LOADING = 0.01
"""Seconds that rank 1 waits for its data in a step."""
ELEMENTS = 1000
SAMPLES, BATCH, MICROBATCH = 64, 16, 4
ASIDE = 0.2
"""Seconds that one member does something else, once."""


def batches(rank: int) -> Iterator[int]:
    """Yield the numbers of the steps, slowly at rank 1."""
    for number in range(1, STEPS + 1):
        if rank == 1:
            time.sleep(LOADING)
        yield number


def context() -> None:
    """Steps by `average_gradients`."""
    ctx = ringfort.init()
    for number in ringfort.loading(batches(ctx.rank)):
        time.sleep(COMPUTING if ctx.rank == 0 else 0.0)
        ringfort.log(number, samples=4 + ctx.rank, loss=np.float32(1 / number))
        average_gradients(ctx, {"w": np.ones(ELEMENTS, np.float32)})
    ctx.barrier()


def elastic(folder: Path) -> None:
    """Steps of an elastic run. The process that makes a file first is the slow one."""
    try:
        (folder / "slow").touch(exist_ok=False)
        is_slow = True
    except FileExistsError:
        is_slow = False
    state = {"w": np.zeros(ELEMENTS)}
    config = AutoDiscoveryConfig(interfaces=["127.0.0.1"])
    checkpoint = folder / f"checkpoint-{is_slow}"
    with ringfort.elastic(
        state, nodes="2:2", name="watched", config=config, checkpoint=checkpoint, checkpoint_every=2
    ) as run:
        for step in run.steps(STEPS, samples=SAMPLES, batch=BATCH, microbatch=MICROBATCH):
            for part in step:
                time.sleep(COMPUTING if is_slow else 0.0)
                step.add({"w": np.ones(ELEMENTS)}, count=len(part), loss=1.0)
            state["w"] -= step.mean()["w"]
            if step.number == 4 and is_slow:
                with run.aside():
                    time.sleep(ASIDE)
            ringfort.log(loss=step.loss, slow=is_slow)


if __name__ == "__main__":
    if sys.argv[1] == "context":
        context()
    else:
        elastic(Path(sys.argv[2]))
    os._exit(0)
