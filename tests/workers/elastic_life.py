"""A program in an elastic run: `python -m tests.workers.elastic_life '{"total": 60}'`. It counts how often each sample
was applied, and says in JSON lines what it does."""

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

SAMPLES = 96


def say(**line: Any) -> None:
    print(json.dumps({**line, "at": time.monotonic()}), flush=True)


class Handler(logging.Handler):
    """Says what the run logs."""

    def emit(self, record: logging.LogRecord) -> None:
        say(log=record.getMessage(), level=record.levelname)


def main(
    name: str = "elastic",
    total: int = 60,
    nodes: str = "2:4",
    batch: int = 32,
    batch_per_member: int | None = None,
    pause: float = 0.004,
    hurry: str = "",
    nonfinite: str = "error",
    nan_at: int = 0,
    nan_loss_at: int = 0,
    leave_at: int = 0,
    break_at: int = 0,
    learner_at: int = 0,
    late_at: int = 0,
    checkpoint: str | None = None,
    timeout: float = 30.0,
) -> None:
    logging.getLogger("ringfort.elastic").addHandler(Handler())
    logging.getLogger("ringfort.elastic").setLevel(logging.INFO)
    state: dict[str, Any] = {"seen": np.zeros(SAMPLES), "skipped": 0, "optimizer": {}}
    config = AutoDiscoveryConfig(interfaces=["127.0.0.1"], timeout=timeout)
    computed, applied, began = 0, 0, -1
    run = ringfort.elastic(
        state,
        name=name,
        nodes=nodes,
        config=config,
        patience=2,
        checkpoint=checkpoint,
        checkpoint_every=10,
        nonfinite=nonfinite,
    )
    with run:
        say(begun=True)
        size = {"batch": batch} if batch_per_member is None else {"batch_per_member": batch_per_member}
        for step in run.steps(total, samples=SAMPLES, **size, microbatch=4, seed=1):
            began = step.number - 1 if began < 0 else began
            for part in step:
                if hurry and not Path(hurry).exists():
                    say(computing=step.number, members=len(run.members))
                    time.sleep(0.02)
                time.sleep(pause)
                gradient = np.zeros(SAMPLES)
                gradient[part] = np.nan if nan_at == step.number and computed else 1 / len(part)
                is_bad = nan_loss_at == step.number and computed
                step.add({"seen": gradient}, loss=np.nan if is_bad else float(len(part)))
                computed += 1
            if step.skipped:
                state["skipped"] += 1
            else:
                state["seen"] += np.round(step.mean()["seen"] * step.samples)
                rest = step.samples % 4  # of a short micro-batch at the end
                assert np.isclose(step.loss * step.samples, 4.0 * (step.samples - rest) + rest * rest, rtol=1e-12)
            if late_at and "late" not in state and step.number >= late_at:  # as optimizers create their momentum
                state["late"], state["optimizer"][0] = [np.zeros(7)], {"momentum": np.zeros((2, 3), np.float32), "n": 0}
            if late_at and "late" in state:
                state["late"][0] += 1
                state["optimizer"][0]["momentum"] += 1
                state["optimizer"][0]["n"] += 1
            applied += 1
            peer = run._participant.members.node.peer_id.rpartition(".")[2]
            say(
                step=step.number, members=len(run.members), samples=step.samples, first=run.is_first, computed=computed,
                peer=peer,
            )  # fmt: skip
            if learner_at == step.number:
                with run.aside():  # until a learner is connected
                    while not run._participant.donor.learners:
                        time.sleep(0.01)
            if leave_at == step.number:
                run.leave()
            if break_at == step.number:
                break
    late = (
        [float(state["late"][0][6]), float(state["optimizer"][0]["momentum"][1, 2]), state["optimizer"][0]["n"]]
        if late_at
        else []
    )
    copied = [int(line.split()[5]) for line in run.events if line.startswith("Copied the state of step ")]
    say(
        done=run.step, seen=sorted({int(count) for count in state["seen"]}), sum=int(state["seen"].sum()),
        skipped=state["skipped"], computed=computed,
        applied=applied, began=began, copied=copied, events=run.events, goodput=run.goodput,
        late=late,
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except ringfort.DistributedError as exc:
        say(failed=type(exc).__name__, why=str(exc))
        sys.exit(3)
