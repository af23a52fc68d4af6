"""What int8 and int4 cost with SGD and with Adam: the training loss of a small network, over several seeds.

    python -m benchmarks.optimizers    (PYTHONPATH=src where it is not installed; some 3 minutes on two cores)

A student of two hidden layers learns what a fixed random teacher says. `many` has 4,096 samples, drawn anew in each
step; `tiny` has 64 samples, all in every step, so that the gradients themselves become small and the noise of a codec
does not average out. With the rate `constant` the noise stays; with `cosine` the rate falls to nothing. Error feedback
is on, as it is by default. Averages go through the real collective, among four workers, as in `benchmarks.learning`.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.learning import WORKERS, Group, Job

INPUTS, HIDDEN, OUTPUTS = 32, 96, 8
SAMPLES = {"many": 4096, "tiny": 64}
BATCH = 32
"""Samples of each worker in a step of `many`."""
RATES = {"sgd": 0.05, "adam": 2e-3}
STRATEGIES = ("none", "int8", "int4")
STEPS, SEEDS = 500, 3


@dataclass(frozen=True)
class Case:
    """One run."""

    task: str
    optimizer: str
    schedule: str
    strategy: str
    seed: int
    steps: int


def train(case: Case) -> float:
    """The training loss in the end, in a process of its own."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    inputs = torch.randn(SAMPLES[case.task], INPUTS)
    with torch.no_grad():
        targets = _network(torch)(inputs) * 3
    student = _network(torch)
    parameters = dict(student.named_parameters())
    make = torch.optim.SGD if case.optimizer == "sgd" else torch.optim.Adam
    optimizer = make(student.parameters(), lr=RATES[case.optimizer])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / case.steps)) if case.schedule == "cosine" else 1.0
    )
    group = Group(Job(case.task, case.strategy, True, case.seed, case.steps))
    share = len(inputs) // WORKERS
    for step in range(case.steps):
        trees: list[dict[str, Any]] = []
        for worker in range(WORKERS):
            places = slice(worker * share, (worker + 1) * share)
            if case.task == "many":
                places = np.random.default_rng([case.seed, step, worker]).integers(0, len(inputs), BATCH)
            student.zero_grad()
            torch.nn.functional.mse_loss(student(inputs[places]), targets[places]).backward()
            trees.append({name: parameter.grad.numpy().copy() for name, parameter in parameters.items()})
        mean = group.average(trees)
        for name, parameter in parameters.items():
            parameter.grad.copy_(torch.from_numpy(mean[name]))
        optimizer.step()
        schedule.step()
    group.close()
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(student(inputs), targets))


def _network(torch: Any) -> Any:
    return torch.nn.Sequential(
        torch.nn.Linear(INPUTS, HIDDEN),
        torch.nn.Tanh(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.Tanh(),
        torch.nn.Linear(HIDDEN, OUTPUTS),
    )


def main(arguments: list[str] | None = None) -> None:
    """Prints a table: for each optimizer how much higher the training loss is than without compression."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at once")
    options = parser.parse_args(arguments)
    kinds = list(product(SAMPLES, RATES, ("constant", "cosine")))
    cases = [
        Case(*kind, strategy, seed, options.steps)
        for kind in kinds
        for strategy in STRATEGIES
        for seed in range(options.seeds)
    ]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        losses = dict(zip(cases, pool.map(train, cases), strict=True))
    print("| samples | optimizer, rate | loss without | `int8` | `int4` | `int4`, each seed |")
    print("| --- " * 6 + "|")
    for task, optimizer, schedule in kinds:
        of = {
            strategy: np.array(
                [losses[Case(task, optimizer, schedule, strategy, s, options.steps)] for s in range(options.seeds)]
            )
            for strategy in STRATEGIES
        }
        worse = {strategy: 100 * (of[strategy] / of["none"] - 1) for strategy in STRATEGIES}
        each = ", ".join(f"{value:+.1f}%" for value in worse["int4"])
        print(
            f"| {task} | {optimizer}, {schedule} | {of['none'].mean():.3g} "
            f"| {worse['int8'].mean():+.1f}% | {worse['int4'].mean():+.1f}% | {each} |"
        )


if __name__ == "__main__":
    main()
