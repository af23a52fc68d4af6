"""A member of an elastic run on loopback. Prints its peer id, then the number, members and sum of every step."""

from __future__ import annotations

import time

import numpy as np

from ringfort import AutoDiscoveryConfig, elastic

SAMPLES = 1000
state = {"w": np.zeros(4)}
config = AutoDiscoveryConfig(interfaces=["127.0.0.1"])
with elastic(state, nodes="1:3", config=config, patience=1.0) as run:
    for step in run.steps(100_000, samples=SAMPLES, batch=64, microbatch=16, seed=1):
        for part in step:
            time.sleep(0.005)  # computes
            step.add({"w": np.full(4, float(part.sum()))})
        state["w"] += step.mean()["w"]
        assert run._members is not None
        print(run._members.node.peer_id, step.number, len(run.members), repr(float(state["w"][0])), flush=True)
