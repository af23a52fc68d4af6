"""Training steps of DistributedDataParallel with the model on one GPU, two ranks, over this library and over Gloo in
the same processes: `python -m benchmarks --only cuda-steps`. `torch_worker.py` is what a rank does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu import ON_LOOPBACK
from benchmarks.parts import TORCH_WAYS, noted, table
from ringfort.launch.local_ranks import LocalRanks

RANKS = 2
WIDTHS = (512, 1024)
"""Of the transformer: 25 and 101 million parameters."""


def measure(rounds: int, *, device: str = "cuda", widths: Iterable[int] = WIDTHS) -> dict[str, Any]:
    """`steps`: milliseconds of each way and size of the model, on `device`."""
    found: dict[str, Any] = {"ranks": RANKS, "steps": []}
    for width in widths:
        arguments = [str(rounds), "", device, str(width)]
        with tempfile.TemporaryDirectory() as folder:
            arguments[1] = folder
            with LocalRanks("benchmarks.torch_worker", RANKS, arguments, variables=ON_LOOPBACK) as ranks:
                for rank, message in ranks.messages():
                    if rank == 0:
                        kind = message.pop("kind", None)
                        found[kind].append(message) if kind else found.update(message)
    return found


def ratios_of(result: Mapping[str, Any]) -> dict[tuple[int, str], float]:
    """Return how many times as fast as Gloo each way is, by parameters of the model and way."""
    times = {(one["parameters"], one["way"]): one["median_ms"] for one in result.get("steps", ())}
    return {(number, way): times[number, "gloo"] / ms for (number, way), ms in times.items()}


def cuda_steps_part(result: Mapping[str, Any]) -> Iterable[str]:
    """The table of steps."""
    yield (
        "A training step (forward, backward, SGD) of a transformer under DistributedDataParallel, "
        f"{result['ranks']} ranks on one {result['device']} (torch {result['torch']}). "
        "All groups are in the same processes and are measured "
        "alternately.\n"
    )
    yield from noted(result)
    ratios = ratios_of(result)
    rows = [
        [
            f"{one['parameters'] / 1e6:.0f} million",
            TORCH_WAYS[one["way"]],
            f"{one['median_ms']:.0f} ms",
            f"{ratios[one['parameters'], one['way']]:.2f}",
        ]
        for one in result["steps"]
    ]
    yield from table(["parameters", "over", "step", "speed relative to Gloo"], rows)
