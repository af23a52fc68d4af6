"""A process of `python -m benchmarks.telemetry`: a rank, or a viewer. It does what its standard input tells it."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from statistics import median

import numpy as np

import ringfort
from ringfort.config import AutoDiscoveryConfig
from ringfort.dashboard.source import LiveSource
from ringfort.training import average_gradients

SLEEP = 0.009
ELEMENTS = 16 * 1024
BATCH = 50
"""All-reduces between two looks at the clock."""
PATIENCE = 30.0
"""Seconds until a viewer sees both ranks."""
EVERY = 0.25
"""Seconds between two views."""


def say(**what: object) -> None:
    """Answer."""
    print(json.dumps(what), flush=True)


def rank() -> None:
    """Make steps and all-reduces."""
    with ringfort.join(1, 60.0) as ctx:
        gradients, small = np.ones(ELEMENTS, np.float32), np.ones(1, np.float32)
        say()
        for line in sys.stdin:
            what, count = line.split()
            if what == "step":
                say(**steps(ctx, gradients, int(count)))
            else:
                say(call=calls(ctx, small, int(count)))


def steps(ctx: ringfort.DistributedContext, gradients: np.ndarray, count: int) -> dict[str, float]:
    """Return the seconds of a step, their mean and median, and of its processor time."""
    times: list[float] = []
    ctx.barrier()
    cpu = time.process_time()
    for number in range(count):
        begun = time.perf_counter()
        time.sleep(SLEEP)
        average_gradients(ctx, [gradients])
        ringfort.log(loss=1.0 / (number + 1), samples=32)
        times.append(time.perf_counter() - begun)
    return {"step": sum(times) / count, "median": median(times), "cpu": (time.process_time() - cpu) / count}


def calls(ctx: ringfort.DistributedContext, small: np.ndarray, count: int) -> float:
    """Return the seconds of an all-reduce, of the fastest batch: if other programs take the cores, both ranks wait
    until the system gives them one at the same time, which says nothing about telemetry."""
    times: list[float] = []
    ctx.barrier()
    for _ in range(count // BATCH):
        begun = time.perf_counter()
        for _ in range(BATCH):
            ctx.all_reduce(small)
        times.append((time.perf_counter() - begun) / BATCH)
    return min(times)


def wait_for_ranks(source: LiveSource) -> None:
    """Wait until both ranks report, over the control links: no trace can be read here."""
    deadline = time.monotonic() + PATIENCE
    while sum(rank.state == "training" for rank in source.view().ranks) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"The viewer sees {source.view()}")
        time.sleep(0.05)


def viewer() -> None:
    """Look from time to time, while it is told to."""
    import threading

    with ExitStack() as looking:
        for line in sys.stdin:
            if line.strip() == "look":
                source = looking.enter_context(LiveSource(AutoDiscoveryConfig()))
                over = threading.Event()

                def look(source: LiveSource = source, over: threading.Event = over) -> None:
                    while not over.wait(EVERY):
                        source.view()

                thread = threading.Thread(target=look)
                looking.callback(thread.join)
                looking.callback(over.set)
                thread.start()
                wait_for_ranks(source)
            else:
                looking.close()
            say()


if __name__ == "__main__":
    rank() if sys.argv[1] == "rank" else viewer()
