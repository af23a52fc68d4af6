"""A program in an elastic run with local steps: `python -m tests.workers.elastic_rounds '{"total": 60}'`. It learns the
slopes of a line from samples, and says in JSON lines what it does."""

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
from tests.workers.elastic_life import Handler, say

SAMPLES, SIZE, BATCH = 240, 6, 5
X = np.random.default_rng(3).standard_normal((SAMPLES, SIZE)).astype(np.float32)
TRUTH = np.linspace(-1, 1, SIZE, dtype=np.float32)


def main(
    total: int = 60,
    nodes: str = "2:4",
    pause: float = 0.002,
    hurry: str = "",
    checkpoint: str | None = None,
    grow_at: int = 0,
    ballast: int = 0,
    interfaces: list[str] | None = None,
    noise: float = 0.0,
    **options: Any,
) -> None:
    """Train for `total` rounds; slowly as long as there is no file `hurry`. After round `grow_at` the program itself
    adds 1 to the weights, at every member. The weights have `ballast` more elements, which drift at random. With
    `noise` in the samples, steps become smaller up to the end. The loss over all samples is told at the end."""
    unknown = noise * np.random.default_rng(4).standard_normal(SAMPLES).astype(np.float32)
    logging.getLogger("ringfort.elastic").addHandler(Handler())
    logging.getLogger("ringfort.elastic").setLevel(logging.INFO)
    state: dict[str, Any] = {"w": np.zeros(SIZE, np.float32), "half": np.zeros(2, np.float16), "rounds": 0, "name": "a"}
    state["ballast"] = np.zeros(ballast + 1, np.float32)
    drift = np.random.default_rng().standard_normal(ballast + 1, np.float32) * np.float32(0.01)
    config = AutoDiscoveryConfig(interfaces=interfaces or ["127.0.0.1"])
    options = {"sync": "local", "every": 8, **options}
    run = ringfort.elastic(
        state,
        name="rounds",
        nodes=nodes,
        config=config,
        patience=2,
        checkpoint=checkpoint,
        checkpoint_every=5,
        **options,
    )
    computed = 0
    with run:
        say(begun=True)
        for step in run.steps(total, samples=SAMPLES, batch=BATCH, seed=1):
            for part in step:
                if hurry and not Path(hurry).exists():
                    time.sleep(0.02)
                time.sleep(pause)
                error = X[part] @ (state["w"] - TRUTH) - unknown[part]
                rate = 0.15 * (1 - step.number / (total + 1) if noise else 1)
                state["w"] -= rate * X[part].T @ error / len(part)
                state["half"] += np.float16(0.25)
                state["ballast"] += drift
                computed += 1
                say(computing=step.number, computed=computed)
                step.add(loss=float((error**2).mean()))
            state["rounds"] += 1
            if step.number == grow_at:
                state["w"] += 1
            say(
                step=step.number, members=len(run.members), samples=step.samples, loss=step.loss,
                w=state["w"].tobytes().hex(),
            )  # fmt: skip
    say(
        done=run.step, rounds=state["rounds"], w=state["w"].tobytes().hex(), half=state["half"].tobytes().hex(),
        computed=computed, error=float(np.abs(state["w"] - TRUTH).max()), events=run.events,
        loss=float(((X @ (state["w"] - TRUTH) - unknown) ** 2).mean()),
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except ringfort.DistributedError as exc:
        say(failed=type(exc).__name__, why=str(exc))
        sys.exit(3)
