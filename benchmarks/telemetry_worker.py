"""A process of `python -m benchmarks.telemetry`: a rank, or a viewer. It does what its standard input tells it."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from statistics import median

import numpy as np

import ringfort
from ringfort.dashboard.source import LiveSource
from ringfort.training import average_gradients

SLEEP = 0.009
ELEMENTS = 16 * 1024
BATCH = 100
"""All-reduces between two looks at the clock."""
EVERY = 0.25
"""Seconds between two views."""


def say(**what: object) -> None:
    """Answer."""
    print(json.dumps(what), flush=True)


def rank() -> None:
    """Make steps and all-reduces."""
    with ringfort.init() as ctx:
        gradients, small = np.ones(ELEMENTS, np.float32), np.ones(1, np.float32)
        say()
        for line in sys.stdin:
            what, count = line.split()
            if what == "step":
                say(**steps(ctx, gradients, int(count)))
            else:
                say(call=calls(ctx, small, int(count)))


def steps(ctx: ringfort.DistributedContext, gradients: np.ndarray, count: int) -> dict[str, float]:
    """Return the seconds of a step and of its processor time."""
    times: list[float] = []
    ctx.barrier()
    cpu = time.process_time()
    for number in range(count):
        begun = time.perf_counter()
        time.sleep(SLEEP)
        average_gradients(ctx, [gradients])
        ringfort.log(loss=1.0 / (number + 1), samples=32)
        times.append(time.perf_counter() - begun)
    return {"step": median(times), "cpu": (time.process_time() - cpu) / count}


def calls(ctx: ringfort.DistributedContext, small: np.ndarray, count: int) -> float:
    """Return the seconds of an all-reduce."""
    times: list[float] = []
    ctx.barrier()
    for _ in range(count // BATCH):
        begun = time.perf_counter()
        for _ in range(BATCH):
            ctx.all_reduce(small)
        times.append((time.perf_counter() - begun) / BATCH)
    return median(times)


def viewer() -> None:
    """Look from time to time, while it is told to."""
    import threading

    with ExitStack() as looking:
        for line in sys.stdin:
            if line.strip() == "look":
                source = looking.enter_context(LiveSource(only_here=True))
                over = threading.Event()

                def look(source: LiveSource = source, over: threading.Event = over) -> None:
                    while not over.wait(EVERY):
                        source.view()

                thread = threading.Thread(target=look)
                looking.callback(thread.join)
                looking.callback(over.set)
                thread.start()
                source.view()
            else:
                looking.close()
            say()


if __name__ == "__main__":
    rank() if sys.argv[1] == "rank" else viewer()
