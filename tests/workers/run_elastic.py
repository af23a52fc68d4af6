"""What the ranks of tests/cluster/test_run_elastic.py do, by name: `ringfort run --elastic ... run_elastic.py NAME`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

RANK = int(os.environ["LOCAL_RANK"])
RESTARTS = int(os.environ["RINGFORT_RESTART_COUNT"])
SAMPLES, BATCH = 96, 8
PASS = SAMPLES // BATCH
"""Steps."""


def train() -> None:
    """Add all samples up. Rank 1 kills itself once, in the middle of a step that it shares with rank 0; the run ends
    with the pass in which its second process has taken part."""
    import numpy as np  # here: the ranks that need neither start sooner without them

    import ringfort

    state: dict[str, Any] = {"sum": np.zeros(1, np.int64), "steps": 0, "stop_at": 0}
    parts = 0
    try:
        ringfort.elastic(state, nodes="2:4")
    except ringfort.ConfigError as exc:
        print(exc)
    with ringfort.elastic(state) as run:
        for step in run.steps(1_000_000, samples=SAMPLES, batch=BATCH, microbatch=2):
            for part in step:
                parts += 1
                if RANK == 1 and RESTARTS == 0 and parts > 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.002)  # computing, so that both have something to do
                step.add({"sum": np.array([part.mean()]), "back": np.array([1.0 if RANK and RESTARTS else 0.0])})
            mean = step.mean()
            state["sum"] += np.rint(mean["sum"] * BATCH).astype(np.int64)
            state["steps"] += 1
            if mean["back"][0] and not state["stop_at"]:
                state["stop_at"] = -(-step.number // PASS) * PASS
            if step.number == state["stop_at"]:
                break
    passes = state["steps"] / PASS
    print("sum", state["sum"][0], "expected", int(passes * sum(range(SAMPLES))), "restarts", RESTARTS)


def alone() -> None:
    print("alone")


def asked() -> None:
    """Train. Once both ranks are in, rank 1 says its process id; rank 0 ends when it is alone again, and not before the
    launcher has noticed."""
    import numpy as np
    import psutil

    import ringfort

    def ranks() -> set[int]:
        return {child.pid for child in psutil.Process(os.getppid()).children()}

    state, were_two, all_ranks = {"w": np.zeros(1)}, False, set[int]()
    with ringfort.elastic(state, nodes="1:2") as run:
        for step in run.steps(1_000_000, samples=8, batch=8, microbatch=2):
            for _ in step:
                time.sleep(0.002)
                step.add({"w": np.ones(1)})
            state["w"] += step.mean()["w"]
            if RANK == 1 and len(run.members) == 2 and not were_two:
                print("pids", os.getpid())
            if len(run.members) == 2 and not were_two:
                were_two, all_ranks = True, ranks()
            if were_two and len(run.members) == 1 and not ranks() >= all_ranks:
                break
    print("alone again")


def leave() -> None:
    """End well when it is asked to."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("left")))
    print("pids", os.getpid())
    signal.pause()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
