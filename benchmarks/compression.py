"""What compression costs and saves: the codecs on one core, and training steps between two hosts on slow wires.

    sudo python -m benchmarks.compression --out benchmarks/results/compression.json

Two hosts are network namespaces joined by a wire of 100 Mbit/s or 1 Gbit/s. On each one process has a model for every
contender: torch's DDP over Gloo, plain and with torch's own fp16 and PowerSGD hooks, and over Ringfort (encrypted) with
each strategy. They take turns, a step each, in alternating order, so that what drifts hits all alike. A step is
forward, backward with the averaging, and the update; it takes as long as on the slower host, and the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # one core, here and in the ranks; before NumPy is imported

import numpy as np  # noqa: E402

from benchmarks.namespaces import INTERFACE, two_hosts, why_not  # noqa: E402
from ringfort.bench.machine import describe_machine  # noqa: E402
from ringfort.compression import encoded  # noqa: E402
from ringfort.compression.strategy import CompressionStrategy  # noqa: E402

RATES = {"100 Mbit/s": (100_000_000, 64 * 1024), "1 Gbit/s": (1_000_000_000, 512 * 1024)}
"""Bits a second each way, and the bytes that may leave at once after a pause: some milliseconds' worth."""
STRATEGIES = (
    "none", "fp16", "bf16", "int8", "int4", "onebit", "topk(0.01)", "topk(0.01)+int4", "randomk(0.1)", "powersgd(4)",
    "auto", "auto(1)",
)  # fmt: skip
BUCKET_MB = 100
"""All gradients in one bucket: with several, torch's PowerSGD issues Gloo's all-reduces in the order in which callbacks
happen to run, which differs from rank to rank, and Gloo aborts."""
GLOO = ("gloo", "gloo fp16", "gloo powersgd(4)")
WIDTH, BATCH = 1024, 32
"""Of the model: 2.1 million parameters, 8.4 MB of gradients."""
PATIENCE = 240.0
"""Seconds for all steps on one wire."""
CODEC_ELEMENTS = 1 << 22
LIMITS = {"int8": 1.0, "topk(0.01)": 0.7}
"""GB/s of float32 input that one core must manage, written and read together."""


# --- codecs -----------------------------------------------------------------------------------------------------------


def codecs(rounds: int) -> dict[str, dict[str, float]]:
    """For each strategy: GB/s of float32 written and read together, and how many times fewer bytes it makes."""
    x = np.random.default_rng(0).standard_normal(CODEC_ELEMENTS).astype(np.float32)
    shape = (2048, CODEC_ELEMENTS // 2048)
    names = [name for name in STRATEGIES if not name.startswith("auto")]
    taken: dict[str, list[tuple[float, float, int]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[:: 1 if turn % 2 == 0 else -1]:
            strategy = CompressionStrategy.parse(name)
            start = time.perf_counter()
            data, _ = encoded.write(strategy, x, shape, None, turn, keep_error=False)
            middle = time.perf_counter()
            encoded.read(data)
            taken[name].append((middle - start, time.perf_counter() - middle, data.size))
    found: dict[str, dict[str, float]] = {}
    for name, times in taken.items():
        write, read = (float(np.median([row[column] for row in times])) for column in (0, 1))
        found[name] = {
            "gb_per_s": x.nbytes / (write + read) / 1e9,
            "write_gb_per_s": x.nbytes / write / 1e9,
            "read_gb_per_s": x.nbytes / read / 1e9,
            "times_fewer_bytes": x.nbytes / times[0][2],
        }
    return found


# --- one rank ---------------------------------------------------------------------------------------------------------


def rank(number: int, address: str, rounds: int, names: Sequence[str]) -> dict[str, Any]:
    """All contenders, in turns. Returns the seconds of each step, the slower rank's."""
    import torch
    import torch.distributed as dist

    import ringfort.torch as ours

    torch.set_num_threads(1)
    store = dist.TCPStore(address, 29_511, 2, is_master=number == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=PATIENCE))
    group: Any = dist.new_group([0, 1], backend="ringfort")
    steps = {name: _contender(name, group, ours) for name in names}
    x = torch.randn(BATCH, WIDTH // 2, generator=torch.Generator().manual_seed(number))
    for _ in range(3):  # PowerSGD of torch's begins at the third; auto measures at the first
        for step in steps.values():
            step(x)
    taken: dict[str, list[float]] = {name: [] for name in names}
    bytes_of: dict[str, int] = dict.fromkeys(names, 0)
    for turn in range(rounds):
        for name in list(names)[:: 1 if turn % 2 == 0 else -1]:
            dist.barrier()
            sent = group.context.metrics_snapshot().bytes_sent
            start = time.perf_counter()
            steps[name](x)
            taken[name].append(time.perf_counter() - start)
            bytes_of[name] += group.context.metrics_snapshot().bytes_sent - sent
    table = torch.tensor([taken[name] for name in names], dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    chosen = sorted(group.context.metrics_snapshot().compression)
    dist.destroy_process_group()
    return {
        "seconds": {name: row.tolist() for name, row in zip(names, table, strict=True)},
        "bytes_sent": {name: sent // rounds for name, sent in bytes_of.items() if sent},
        "went_by": chosen,
    }


def _contender(name: str, group: Any, ours: Any) -> Callable[[Any], None]:
    """One training step, by name."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = (
        torch.nn.Linear(WIDTH // 2, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH // 2),
    )
    model: Any = torch.nn.Sequential(*layers)
    if name.startswith("gloo"):
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
        if name == "gloo fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name != "gloo":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_MB)
        if name != "none":
            model.register_comm_hook(group, ours.compress_hook(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Any) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


# --- hosts ------------------------------------------------------------------------------------------------------------


def between_hosts(rate: int, burst: int, rounds: int, names: Sequence[str]) -> dict[str, Any]:
    """All contenders on two hosts with such a wire."""
    with two_hosts(rate, burst) as hosts, tempfile.TemporaryDirectory() as home:
        prefixes = [host.prefix for host in hosts]
        return _both(prefixes, hosts[0].address, home, rounds, names, {"GLOO_SOCKET_IFNAME": INTERFACE})


def on_one_host(shared_memory: str, rounds: int, names: Sequence[str]) -> dict[str, Any]:
    """The same on this host alone: over shared memory or loopback."""
    with tempfile.TemporaryDirectory() as home:
        variables = {"RINGFORT_SHM": shared_memory, "GLOO_SOCKET_IFNAME": "lo"}
        return _both([(), ()], "127.0.0.1", home, rounds, names, variables)


def _both(
    prefixes: Sequence[tuple[str, ...]],
    address: str,
    home: str,
    rounds: int,
    names: Sequence[str],
    variables: dict[str, str],
) -> dict[str, Any]:
    environment = {**os.environ, "RINGFORT_HOME": home, "OMP_NUM_THREADS": "1", **variables}
    running: list[subprocess.Popen[str]] = []
    try:
        for number, prefix in enumerate(prefixes):
            words = [sys.executable, "-m", "benchmarks.compression", "--rank", str(number), "--address", address]
            words += ["--rounds", str(rounds), "--names", ",".join(names)]
            running.append(subprocess.Popen([*prefix, *words], env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    for number, process in enumerate(running):
        if process.returncode:
            raise RuntimeError(f"rank {number} ended with {process.returncode}; its words are above")
    return json.loads(outputs[0].splitlines()[-1])


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """The median milliseconds of each, and AUTO beside the best of what its error allows and of all."""
    medians = {name: float(np.median(times)) * 1e3 for name, times in found["seconds"].items()}
    bounded = ("none", "fp16", "bf16", "int8", "int4")
    ours = [name for name in medians if name in STRATEGIES and not name.startswith("auto")]
    result: dict[str, Any] = {"median_ms": medians, "bytes_sent": found["bytes_sent"], "went_by": found["went_by"]}
    if "auto" in medians:
        result["auto_over_best"] = medians["auto"] / min(medians[name] for name in ours if name in bounded)
    if "auto(1)" in medians:
        result["auto(1)_over_best"] = medians["auto(1)"] / min(medians[name] for name in ours)
    return result


def show(what: str, summary: dict[str, Any]) -> None:
    """For people."""
    print(what)
    for name, median in sorted(summary["median_ms"].items(), key=lambda item: item[1]):
        sent = summary["bytes_sent"].get(name)
        print(f"  {name:18} {median:9.1f} ms" + (f"  {sent / 1e6:8.3f} MB sent" if sent else ""))
    print(f"  auto over the best within its error {summary.get('auto_over_best', float('nan')):.2f}", end="")
    print(f", auto(1) over the best {summary.get('auto(1)_over_best', float('nan')):.2f}", flush=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compression", description=__doc__)
    parser.add_argument("--out", type=Path, help="where the JSON goes; what is there of other parts stays")
    parser.add_argument("--only", help=f"with commas, of: codecs, {', '.join(RATES)}, shared memory, loopback")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--names", default=",".join((*GLOO, *STRATEGIES)), help="contenders [%(default)s]")
    given = parser.parse_args()
    names = given.names.split(",")
    if given.rank is not None:
        print(json.dumps(rank(given.rank, given.address, given.rounds, names)))
        return 0
    wanted = given.only.split(",") if given.only else ["codecs", *RATES, "shared memory", "loopback"]
    results: dict[str, Any] = {}
    if given.out is not None and given.out.exists():
        results = json.loads(given.out.read_text(encoding="utf-8"))
    for part in wanted:
        if part == "codecs":
            results[part] = codecs(given.rounds)
            for name, speeds in results[part].items():
                limit = f"  (at least {LIMITS[name]:g})" if name in LIMITS else ""
                print(f"  {name:18} {speeds['gb_per_s']:6.2f} GB/s{limit}")
        elif part in RATES:
            reason = why_not()
            if reason is not None:
                print(f"{part}: left out: {reason}", file=sys.stderr)
                continue
            results[part] = summarize(between_hosts(*RATES[part], given.rounds, names))
            show(part, results[part])
        else:
            shared = "on" if part == "shared memory" else "off"
            results[part] = summarize(on_one_host(shared, given.rounds, ["gloo", "none", "int8", "auto", "auto(1)"]))
            show(part, results[part])
    results["machine"] = describe_machine(["numpy", "ringfort", "torch"])
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
