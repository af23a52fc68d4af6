"""What people look at in tests/integration/test_top.py: trains until it is killed, and the last rank takes longer."""

from __future__ import annotations

import time

import numpy as np

import ringfort
from ringfort.training import average_gradients

with ringfort.init() as ctx:
    gradients = {"weights": np.ones(1000, np.float32)}
    print(f"rank {ctx.rank} has begun", flush=True)
    while True:
        time.sleep(0.01 if ctx.rank + 1 < ctx.world_size else 0.04)  # computing
        average_gradients(ctx, gradients)
