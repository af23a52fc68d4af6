"""One rank of `gpu.py`: `python -m benchmarks.gpu_worker MIB ROUNDS FOLDER`.

All groups are in the same processes and take turns, so that what disturbs the machine disturbs all of them alike.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from ringfort.config import Environment
from ringfort.launch.local_ranks import report

torch: Any = import_module("torch")
dist: Any = import_module("torch.distributed")
cuda: Any = import_module("ringfort.torch.cuda")

USUAL = cuda.CHUNK_BYTES
SMALL = 1024
"""Elements of what is small: 4 KiB."""
PATIENCE = 100
"""Seconds after which a rank that hangs says where, and ends."""


class Way(NamedTuple):
    """A group, and how it moves what is on the device."""

    backend: str
    variables: dict[str, str]
    chunk: int = USUAL


WAYS = {
    "ringfort": Way("ringfort", {}),
    "2 MiB chunks": Way("ringfort", {}, 2 << 20),
    "4 MiB chunks": Way("ringfort", {}, 4 << 20),
    "16 MiB chunks": Way("ringfort", {}, 16 << 20),
    "32 MiB chunks": Way("ringfort", {}, 32 << 20),
    "encrypted TCP": Way("ringfort", {"RINGFORT_SHM": "off"}),
    "gloo": Way("gloo", {}),
}
"""As it comes; other settings of ours; and what people use today."""


def main(mib: int, rounds: int, folder: str) -> None:
    """Everything once a round; the first round warms up."""
    count = (mib << 20) // 4
    device, host = torch.ones(count, device="cuda"), torch.ones(count)
    pinned = torch.ones(count, pin_memory=True)
    with groups(folder) as ways:
        taken: dict[tuple[str, str], list[float]] = {}

        def measure(name: str, what: str, action: Callable[[], object]) -> None:
            dist.barrier()
            start = time.perf_counter()
            action()
            called = time.perf_counter()
            torch.cuda.synchronize()
            both = np.array([called - start, time.perf_counter() - start])
            ways["ringfort"].context.all_reduce(both, MAX)
            for kind, seconds in zip(("call", what), both.tolist(), strict=True):
                taken.setdefault((name, kind), []).append(1e3 * seconds)

        for turn in range(rounds + 1):
            start = time.perf_counter()
            measure("copy", "down", lambda: pinned.copy_(device, non_blocking=True))
            measure("copy", "up", lambda: device.copy_(pinned, non_blocking=True))
            for name, way in WAYS.items():
                with used(way):
                    if name in ("ringfort", "encrypted TCP", "gloo"):
                        measure(name, "host", lambda group=ways[name]: dist.all_reduce(host, group=group))
                        taken[name, "call"].pop()
                    measure(name, "device", lambda group=ways[name]: dist.all_reduce(device, group=group))
            device.fill_(1.0)
            host.fill_(1.0)
            report(kind="round", number=turn, seconds=time.perf_counter() - start)
        median = {key: statistics.median(times[1:]) for key, times in taken.items()}
        down, up = median["copy", "down"], median["copy", "up"]
        report(
            kind="machine",
            device=torch.cuda.get_device_name(),
            torch=torch.__version__,
            cores=len(os.sched_getaffinity(0)),
            down_ms=down,
            up_ms=up,
            copy_ms=down + up,
        )
        for name in WAYS:
            own = median.get((name, "host"))
            base = own if own is not None else median["ringfort", "host"]
            whole = median[name, "device"]
            ratio = max(down + up, base) / whole
            report(kind="ways", way=name, host_ms=own, device_ms=whole, call_ms=median[name, "call"], ratio=ratio)
        for name in ("ringfort", "encrypted TCP", "gloo"):
            with used(WAYS[name]):
                report(kind="small", way=name, **small(ways[name]))


def small(group: Any) -> dict[str, float]:
    """Microseconds of a small all-reduce, until the device has it and in the host's memory."""
    figures: dict[str, float] = {}
    for where in ("cuda", "cpu"):
        x = torch.ones(SMALL, device=where)
        times: list[float] = []
        for _ in range(200):
            x.fill_(1.0)
            torch.cuda.synchronize()
            start = time.perf_counter()
            dist.all_reduce(x, group=group)
            torch.cuda.synchronize()
            times.append(1e6 * (time.perf_counter() - start))
        figures["device_us" if where == "cuda" else "host_us"] = statistics.median(times)
    return figures


@contextmanager
def used(way: Way) -> Iterator[None]:
    """Set the environment that the groups of a way read when they are made and first used."""
    os.environ.update(way.variables)
    try:
        yield
    finally:
        for name in way.variables:
            del os.environ[name]


@contextmanager
def groups(folder: str) -> Iterator[dict[str, Any]]:
    """A group for each way. The default is Gloo's, so that all of ours make connections of their own."""
    told = Environment.from_mapping()
    import_module("ringfort.torch").register()  # where Ringfort is not installed but on the path
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=told.rank, world_size=told.world_size)
    try:
        made: dict[str, Any] = {}
        for name, way in WAYS.items():
            with used(way):
                made[name] = dist.group.WORLD if way.backend == "gloo" else dist.new_group(backend=way.backend)
                if way.chunk != USUAL:
                    made[name].engines["cuda"] = cuda.CudaEngine(made[name].context, chunk_bytes=way.chunk)
        yield made
    finally:
        dist.destroy_process_group()


MAX: Any = import_module("ringfort").ReduceOp.MAX

if __name__ == "__main__":
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
