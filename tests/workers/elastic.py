"""A member of an elastic run with whole-number gradients: `python -m tests.workers.elastic NAME TOTAL FOLDER`.

It prints a line of JSON for each step, and one at the end. Once the file `hurry` is in FOLDER, it computes quickly.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import ringfort
from ringfort.config import AutoDiscoveryConfig
from ringfort.training.elastic.dealing import Data

DATA = Data(samples=320, batch=32, microbatch=4, seed=5)
PATIENCE = 6.0
"""Seconds."""
SLOW = 0.04
"""Seconds that a micro-batch takes."""
WIDTH = 64


def gradient(part: np.ndarray) -> dict[str, Any]:
    """Return means of whole numbers over a number of samples that is a power of two: exact in any order. `seen` counts
    the samples."""
    w = np.outer(part % 97, np.arange(1, WIDTH + 1)).sum(0) / len(part)
    return {"w": w, "seen": np.bincount(part, minlength=DATA.samples) / len(part)}


def update(state: dict[str, Any], mean: dict[str, Any]) -> None:
    """Apply a step. The order of the steps matters."""
    state["w"][:] = (state["w"] * 3 + mean["w"] * DATA.batch) % 1000003
    state["seen"] += mean["seen"] * DATA.batch


def fresh() -> dict[str, Any]:
    """Return the state before the first step."""
    return {"w": np.zeros(WIDTH), "seen": np.zeros(DATA.samples)}


def plain_steps() -> Iterator[dict[str, Any]]:
    """Yield the state before the first step and after each step, in one process without faults: always the same dict,
    which changes."""
    state, cursor = fresh(), 0
    while True:
        yield state
        span = DATA.span(cursor)
        sums = fresh()
        for index in range(DATA.parts(span)):
            part = DATA.part(span, index)
            for key, mean in gradient(part).items():
                sums[key] += mean * len(part)
        update(state, {key: value / span.samples for key, value in sums.items()})
        cursor += span.samples


def plain_loop(total: int) -> dict[str, Any]:
    """Return the state after so many steps in one process without faults."""
    return next(islice(plain_steps(), total, None))


def main() -> None:
    """Take part until the run has ended."""
    name, total, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    state = fresh()

    def say(**what: Any) -> None:
        print(json.dumps({"name": name, "members": list(run.members), "events": list(run.events), **what}), flush=True)

    config = AutoDiscoveryConfig(interfaces=["127.0.0.1"])
    with ringfort.elastic(state, nodes="2:4", name="elastic-test", patience=PATIENCE, config=config) as run:
        for step in run.steps(
            total, samples=DATA.samples, batch=DATA.batch, microbatch=DATA.microbatch, seed=DATA.seed
        ):
            for part in step:
                time.sleep(0.0 if (folder / "hurry").exists() else SLOW)
                step.add(gradient(part))
            update(state, step.mean())
            say(step=step.number)
        say(step=run.step, w=state["w"].tolist(), seen=state["seen"].tolist())


if __name__ == "__main__":
    main()
