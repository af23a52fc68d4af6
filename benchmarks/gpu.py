"""All-reduce of a tensor on a GPU, two ranks on one device, against what it is made of: the copies from and to the
device, and the same all-reduce in the host's memory. `python -m benchmarks.gpu --out gpu.json`.

`ratio` is the slower of the two over the whole: 1 if the faster hides behind it. `gpu_worker.py` is what a rank does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.parts import table
from ringfort.bench.machine import describe_machine
from ringfort.launch.local_ranks import LocalRanks

RANKS = 2
GPU_SHARE = 0.8
"""Claimed of `ratio`."""
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""Left alone, Gloo takes the interface that the host's name resolves to."""


def why_not() -> str | None:
    """Why this cannot be measured here; None if it can."""
    if find_spec("torch") is None or not import_module("torch").cuda.is_available():
        return "it needs an NVIDIA GPU and a torch built for CUDA: pip install torch"
    return None


def measure(
    mib: int = 256, rounds: int = 10, on_round: Callable[[int, float], None] = lambda *_: None
) -> dict[str, Any]:
    """Milliseconds of everything, medians of `rounds` in which all take turns; each as long as its slower rank."""
    found: dict[str, Any] = {"ranks": RANKS, "mib": mib, "rounds": rounds, "ways": [], "small": []}
    with (
        tempfile.TemporaryDirectory() as folder,  # the ranks meet in a file: torch's store would want the port
        LocalRanks("benchmarks.gpu_worker", RANKS, [str(mib), str(rounds), folder], variables=ON_LOOPBACK) as ranks,
    ):
        for rank, message in ranks.messages():
            kind = message.pop("kind")
            if rank > 0:
                continue
            if kind == "machine":
                found |= message
            elif kind == "round":
                on_round(message["number"], message["seconds"])
            else:
                found[kind].append(message)
    return {**found, "date": datetime.now(timezone.utc).date().isoformat()}


def gpu_part(result: Mapping[str, Any]) -> Iterable[str]:
    """The whole against its parts, and beside Gloo's."""
    yield (
        f"Measured on {result['date']} on a machine with one {result['device']} ({result['machine']['processor']}, "
        f"{result['cores']} cores; torch {result['torch']}). An all-reduce of a CUDA tensor of {result['mib']} MiB "
        f"through `torch.distributed`, {result['ranks']} ranks on the same GPU, until the device has the result, and "
        "the same all-reduce in host memory. All are measured alternately in the same processes; the times are medians "
        f"of {result['rounds']} rounds, each of the slower rank. Copying as many bytes down takes "
        f"{result['down_ms']:.1f} ms, up {result['up_ms']:.1f} ms, while the other rank copies too. **Share**: the "
        "slowest of these parts (the copies, and the all-reduce in host memory) divided by the whole; it is 1 if the "
        "other parts are hidden completely.\n"
    )
    rows = [
        [
            _NAMES.get(way["way"], way["way"]),
            "-" if way["host_ms"] is None else f"{way['host_ms']:.1f} ms",
            f"{way['device_ms']:.1f} ms",
            f"{way['ratio']:.2f}",
            f"{way['call_ms']:.1f} ms",
        ]
        for way in result["ways"]
    ]
    yield from table(["over", "in host memory", "on the GPU", "share", "host busy with the call"], rows)
    yield "With 4 KiB:\n"
    rows = [
        [_NAMES.get(one["way"], one["way"]), f"{one['host_us']:.0f} us", f"{one['device_us']:.0f} us"]
        for one in result["small"]
    ]
    yield from table(["over", "in host memory", "on the GPU"], rows)


_NAMES = {
    "ringfort": "shared memory (default; 8 MiB chunks)",
    "gloo": "Gloo",
}


def main() -> int:
    """Measures, prints a table and writes the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--mib", type=int, default=256, help="size of the tensor (256)")
    parser.add_argument("--rounds", type=int, default=10, help="measurements of each (10)")
    given = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return 2
    found = measure(
        given.mib, given.rounds, lambda number, seconds: print(f"round {number}: {seconds:.1f} s", flush=True)
    )
    found["machine"] = describe_machine(["numpy", "torch"])
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['device']}, torch {found['torch']}, {found['cores']} cores; {given.mib} MiB, {RANKS} ranks")
    print(f"copy down and up: {found['copy_ms']:.1f} ms (down {found['down_ms']:.1f}, up {found['up_ms']:.1f})")
    for way in found["ways"]:
        ratio = f"ratio {way['ratio']:.2f}" if way["ratio"] is not None else ""
        host = f"host {way['host_ms']:8.1f} ms  " if way["host_ms"] is not None else " " * 19
        print(f"{way['way']:14} {host}device {way['device_ms']:8.1f} ms  call {way['call_ms']:8.2f} ms  {ratio}")
    for small in found["small"]:
        print(f"{small['way']:14} 4 KiB: {small['device_us']:.0f} us, in the host's memory {small['host_us']:.0f} us")
    best = next(way["ratio"] for way in found["ways"] if way["way"] == "ringfort")
    print(f"{best:.2f} of the slower part; wanted {GPU_SHARE}: {'reached' if best >= GPU_SHARE else 'NOT REACHED'}")
    return 0 if best >= GPU_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
