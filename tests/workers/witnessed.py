"""A member of an elastic run on loopback. Prints its peer id, and the number, members and state of every step."""

from __future__ import annotations

import gc
import time

import numpy as np

from ringfort import AutoDiscoveryConfig, elastic
from ringfort.cluster.node import ClusterNode

state = {"w": np.zeros(4)}
config = AutoDiscoveryConfig(interfaces=["127.0.0.1"])
peer = ""
with elastic(state, name="elastic", nodes="1:3", config=config, patience=1.0) as run:
    for step in run.steps(100_000, samples=1000, batch=64, microbatch=16, seed=1):
        for part in step:
            time.sleep(0.005)  # computes
            step.add({"w": np.full(4, float(part.sum()))})
        state["w"] += step.mean()["w"]
        peer = peer or next(found.peer_id for found in gc.get_objects() if isinstance(found, ClusterNode))
        print(peer, step.number, len(run.members), repr(float(state["w"][0])), flush=True)
