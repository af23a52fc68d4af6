"""One machine of `python -m benchmarks.watching`: trains a sparse linear model with others, for ever.

Computing is mostly sleep, so that the machine that runs the benchmark, whose cores all members share, does not decide
who is slow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import ringfort
from ringfort.training import average_gradients

FEATURES = 64
"""Of a sample, which are not 0."""
RATE = 0.5
"""The learning rate."""


class Batch(NamedTuple):
    places: Any
    """Which features each sample has."""
    targets: Any


def batches(truth: Any, samples: int, seconds: float, seed: int) -> Iterator[Batch]:
    """Yield batches without end; each takes so many seconds to load."""
    random = np.random.default_rng(seed)
    while True:
        time.sleep(seconds)
        places = random.integers(0, truth.size, (samples, FEATURES))
        yield Batch(places, truth[places].sum(axis=1))


def gradient_of(weights: Any, batch: Batch, out: Any) -> float:
    """Write the mean gradient of a batch to `out`. Return the loss."""
    wrong = weights[batch.places].sum(axis=1) - batch.targets
    out.fill(0)
    np.add.at(out, batch.places, wrong[:, None] / len(batch.targets))
    return float(np.mean(wrong**2) / 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, required=True, help="the other machines")
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True, help="in each batch of this machine")
    parser.add_argument("--compute", type=float, required=True, help="seconds for each batch")
    parser.add_argument("--load", type=float, default=0.0, help="seconds to load each batch")
    parser.add_argument("--compression", default=None)
    given = parser.parse_args()
    weights = np.zeros(given.parameters, np.float32)
    gradient = np.empty_like(weights)
    truth = np.random.default_rng(0).standard_normal(given.parameters).astype(np.float32)
    with ringfort.join(given.peers) as ctx:
        for batch in ringfort.loading(batches(truth, given.samples, given.load, ctx.rank)):
            end = time.perf_counter() + given.compute
            loss = gradient_of(weights, batch, gradient)
            time.sleep(max(0.0, end - time.perf_counter()))
            ringfort.log(samples=given.samples)
            average_gradients(ctx, {"weights": gradient}, weight=given.samples, compression=given.compression)
            weights -= RATE * gradient
            ringfort.log(loss=loss)


if __name__ == "__main__":
    main()
