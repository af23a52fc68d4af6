"""A member that is away for a while: `python -m tests.workers.elastic_absence '{"folder": "/tmp"}'`. It counts how
often each sample was applied, and says in JSON lines what it does."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import ringfort
from ringfort.config import AutoDiscoveryConfig
from ringfort.training.elastic import practice, slow_members

SAMPLES, BATCH, MICROBATCH = 96, 32, 4


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(log=record.getMessage(), level=record.levelname)


def main(
    folder: str,
    nodes: str = "1:4",
    total: int = 1_000_000,
    slow: float = 0.0,
    aside: float = 0.0,
    checkpoint: str | None = None,
    patience: float = 10.0,
) -> None:
    """Train up to step `total`, or until the file `stop` is in the folder. While the file `busy` is there, each
    micro-batch takes `slow` seconds more, and after each step the program is aside for `aside` seconds."""
    slow_members.GRACE, practice.EVERY = 1_000_000, 0.3
    logging.getLogger("ringfort.elastic").addHandler(Handler())
    logging.getLogger("ringfort.elastic").setLevel(logging.INFO)
    state = {"seen": np.zeros(SAMPLES), "stop": 0}
    config = AutoDiscoveryConfig(interfaces=["127.0.0.1"])
    applied = computed = 0
    options = {"name": "absence", "nodes": nodes, "config": config, "patience": patience, "checkpoint": checkpoint}
    with ringfort.elastic(state, **options) as run:
        for step in run.steps(total, samples=SAMPLES, batch=BATCH, microbatch=MICROBATCH, seed=1):
            for part in step:
                time.sleep(0.004 + slow * (Path(folder) / "busy").exists())
                gradient = np.zeros(SAMPLES)
                gradient[part] = 1 / len(part)
                # Each member's wish counts, so that all stop at the same step.
                step.add({"seen": gradient, "stop": np.ones(1) * (Path(folder) / "stop").exists()})
                computed += 1
                if not run.members:
                    say(practice=step.number)
            mean = step.mean()
            state["seen"] += np.round(mean["seen"] * BATCH)
            applied += 1
            say(step=step.number, members=len(run.members))
            if aside and (Path(folder) / "busy").exists():
                with run.aside():
                    time.sleep(aside)
            if mean["stop"][0] and step.number % (SAMPLES // BATCH) == 0:
                break
    say(done=run.step, seen=sorted({int(count) for count in state["seen"]}), applied=applied, computed=computed)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
