"""A member of an elastic run that damages its own copies: `python -m tests.workers.diverging '{"total": 60}'`.

It says in JSON lines what it does. Gradients count the samples, so the state after any number of steps is known.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any
from unittest.mock import patch

import numpy as np

import ringfort
from ringfort.config import AutoDiscoveryConfig
from ringfort.context import DistributedContext

SAMPLES = 96


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def damaging(where: dict[str, int], once_at: int, from_step: int) -> Any:
    """Return an all-reduce that damages this member's copy of the result of a step: once, or from a step on."""
    original, done = DistributedContext.all_reduce, set[int]()

    def all_reduce(self: DistributedContext, x: np.ndarray, *arguments: Any, **more: Any) -> Any:
        found = original(self, x, *arguments, **more)
        step = where["step"] + 1
        is_result = x.dtype == np.float64 and x.size >= SAMPLES  # weights and losses are behind the gradients
        if is_result and (step >= from_step > 0 or (step == once_at and step not in done)):
            done.add(step)
            found[5] += 1
        return found

    return all_reduce


def main(
    name: str = "diverging",
    total: int = 150,
    nodes: str = "2:4",
    result_once: int = 0,
    result_from: int = 0,
    state_at: int = 0,
    drift: float = 0.0,
    machine_class: str = "",
    checkpoint: str | None = None,
) -> None:
    """Take part. Damage this member's copy of the result of a step once, or from a step on; its state at a step; or let
    its update round differently."""
    state = {"seen": np.zeros(SAMPLES), "steps": 0, "moving": np.zeros(2)}
    where = {"step": 0}
    config = AutoDiscoveryConfig(interfaces=["127.0.0.1"])
    run = ringfort.elastic(
        state,
        name=name,
        nodes=nodes,
        patience=10,
        config=config,
        machine_class=machine_class,
        checkpoint=checkpoint,
    )
    with patch.object(DistributedContext, "all_reduce", damaging(where, result_once, result_from)), run:
        for step in run.steps(total, samples=SAMPLES, batch=32, microbatch=4, seed=1):
            for part in step:
                time.sleep(0.002)
                gradient = np.zeros(SAMPLES)
                gradient[part] = 1 / len(part)
                step.add({"seen": gradient})
            state["seen"] += np.round(step.mean()["seen"] * 32)
            state["steps"] += 1
            state["moving"] += 1.0 + drift
            if step.number == state_at:
                state["seen"][7] += 1
            where["step"] = step.number
            say(step=step.number, members=list(run.members))
    say(
        done=run.step,
        seen=sorted({int(count) for count in state["seen"]}),
        moving=state["moving"].tolist(),
        events=run.events,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    try:
        main(**json.loads(sys.argv[1]))
    except ringfort.DivergedError as exc:
        say(failed=str(exc), step=exc.step, machines=exc.machines)
        sys.exit(3)
