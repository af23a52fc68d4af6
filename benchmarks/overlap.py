"""What an asynchronous all-reduce and the computing beside it cost each other, at several switch intervals.

The interpreter lock goes from a thread that computes in Python to one that waits for it after `sys.getswitchinterval`.
An all-reduce asks for the lock back after every system call, so a long interval makes it wait often.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import ringfort
from ringfort.launch.local_ranks import LocalRanks, report

NBYTES = 16 << 20
"""A usual bucket of gradients."""
RANKS = 2
INTERVALS = (5e-3, 1e-3, 5e-4, 1e-4, 2e-5)
"""Seconds; the first is Python's own."""
ALONE_SECONDS = 0.05
"""A round, for the speed of computing with nothing beside it."""
MATRIX = 512
"""Rows and columns: a product takes a few milliseconds, as those of a small model do."""

Cell = dict[str, Any]


def measure(rounds: int) -> dict[str, Any]:
    """One cell for each way of moving, kind of computing and interval: milliseconds, and what the computing kept."""
    cells: list[Cell] = []
    for way, variables in (("as it comes", {}), ("tcp", {"RINGFORT_SHM": "off"})):
        with LocalRanks("benchmarks.overlap", RANKS, [str(rounds)], variables=variables) as group:
            cells += [{"way": way, **message} for rank, message in group.messages() if rank == 0]
    return {"bytes": NBYTES, "ranks": RANKS, "cells": cells}


def in_python() -> None:
    """A little work that never lets go of the lock."""
    total = 0
    for number in range(200):
        total += number * number


def in_torch() -> Callable[[], object] | None:
    """Matrix products, which let go of it; None without torch."""
    if find_spec("torch") is None:
        return None
    import torch

    torch.set_num_threads(1)
    a, b, out = (torch.ones(MATRIX, MATRIX) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def speed_alone(work: Callable[[], object]) -> float:
    """Pieces of work a second."""
    start, done = time.perf_counter(), 0
    while (taken := time.perf_counter() - start) < ALONE_SECONDS:
        work()
        done += 1
    return done / taken


def beside(ctx: ringfort.DistributedContext, x: Any, work: Callable[[], object] | None) -> tuple[float, float]:
    """Seconds until an asynchronous all-reduce was done, and pieces of work a second meanwhile."""
    ctx.barrier()
    start, done = time.perf_counter(), 0
    pending = ctx.all_reduce(x, async_op=True)
    if work is None:
        pending.wait()
    else:
        while not pending.is_completed():
            work()
            done += 1
        pending.wait()
    taken = time.perf_counter() - start
    return taken, done / taken


def rank(rounds: int) -> None:
    """One rank: every interval and kind of computing in each round, so that drift hits all alike."""
    kinds: dict[str, Callable[[], object] | None] = {"nothing": None, "Python": in_python}
    products = in_torch()
    if products is not None:
        kinds["torch"] = products
    with ringfort.init() as ctx:
        x = np.zeros(NBYTES // 4, np.float32)
        alone: dict[str, list[float]] = {name: [] for name in kinds}
        for work in kinds.values():
            beside(ctx, x, work)
        found: dict[tuple[str, float], list[tuple[float, float]]] = {
            (name, interval): [] for interval in INTERVALS for name in kinds
        }
        for _ in range(rounds):
            for name, work in kinds.items():
                ctx.barrier()
                alone[name].append(speed_alone(work) if work is not None else 1.0)
            for (name, interval), results in found.items():
                sys.setswitchinterval(interval)
                results.append(beside(ctx, x, kinds[name]))
        for (name, interval), results in found.items():
            times = sorted(taken * 1e3 for taken, _ in results)
            kept = statistics.median(speed for _, speed in results) / statistics.median(alone[name])
            report(
                beside=name, interval=interval, median_ms=statistics.median(times), low_ms=times[0], high_ms=times[-1],
                kept=kept,
            )  # fmt: skip


if __name__ == "__main__":
    rank(int(sys.argv[1]))
