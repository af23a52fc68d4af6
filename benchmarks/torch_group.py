"""What torch's process group costs above the context that it runs on, and a training step of DistributedDataParallel
over it and over Gloo. `torch_worker.py` is what a rank does."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from typing import Any

from ringfort.launch.local_ranks import LocalRanks

RANKS = 2


def why_not() -> str | None:
    """Why this cannot be measured here; None if it can."""
    return "torch is not installed" if find_spec("torch") is None else None


def measure(rounds: int) -> dict[str, Any]:
    """`calls`: microseconds of each through torch and on the context. `steps`: milliseconds of each way."""
    found: dict[str, Any] = {"ranks": RANKS, "calls": [], "steps": []}
    with (
        tempfile.TemporaryDirectory() as folder,  # the ranks meet in a file: torch's store would want the port
        LocalRanks("benchmarks.torch_worker", RANKS, [str(rounds), folder]) as ranks,
    ):
        for rank, message in ranks.messages():
            if rank == 0:
                kind = message.pop("kind", None)
                found[kind].append(message) if kind else found.update(message)
    return found
