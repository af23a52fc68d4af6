"""Elastic training with NumPy: start it on any number of machines, kill some, start them again.

    ringfort run --elastic --nodes 1:8 examples/elastic_numpy.py      # on each machine, at any time
    python examples/elastic_numpy.py --checkpoint run1                # or without a launcher

A small network learns the product of two numbers. Each member prints a line now and then; all of them end with the same
weights, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import time

import numpy as np

import ringfort

Array = np.ndarray
SAMPLES, HIDDEN = 20_000, 32


def new_state(seed: int) -> dict[str, object]:
    """Everything that a machine needs to continue: weights and momentum. The same on every machine that starts."""
    random = np.random.default_rng(seed)
    weights = {
        "hidden": random.standard_normal((3, HIDDEN)),
        "output": random.standard_normal(HIDDEN) / HIDDEN,
    }
    return {"weights": weights, "momentum": {name: np.zeros_like(weight) for name, weight in weights.items()}}


def gradients(weights: dict[str, Array], x: Array, y: Array) -> tuple[float, dict[str, Array]]:
    """The mean loss over some samples, and its derivatives."""
    hidden = np.tanh(x @ weights["hidden"])
    error = hidden @ weights["output"] - y
    slopes = (error[:, None] * weights["output"]) * (1 - hidden**2)
    return float((error**2).mean() / 2), {"hidden": x.T @ slopes / len(x), "output": error @ hidden / len(x)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--checkpoint", help="a folder on this machine")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds per micro-batch, to watch the run")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    random = np.random.default_rng(7)
    x = np.hstack([random.uniform(-1, 1, (SAMPLES, 2)), np.ones((SAMPLES, 1))])
    y = x[:, 0] * x[:, 1]

    state = new_state(seed=0)
    weights, momentum = state["weights"], state["momentum"]
    assert isinstance(weights, dict)
    assert isinstance(momentum, dict)
    with ringfort.elastic(state, checkpoint=arguments.checkpoint) as run:
        for step in run.steps(arguments.steps, samples=SAMPLES, batch=256, microbatch=32, seed=0):
            for part in step:
                time.sleep(arguments.pause)
                loss, slopes = gradients(weights, x[part], y[part])
                step.add(slopes, loss=loss)
            for name, slope in step.mean().items():
                momentum[name] *= 0.9
                momentum[name] += slope
                weights[name] -= 0.1 * momentum[name]
            ringfort.log(loss=step.loss)  # for `ringfort top` and `ringfort dash`
            if step.number % 200 == 0:
                print(f"step {step.number}: loss {step.loss:.6f}, {len(run.members)} members", flush=True)
    digest = hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()
    print(f"done at step {run.step}, weights {digest[:16]}")


if __name__ == "__main__":
    main()
