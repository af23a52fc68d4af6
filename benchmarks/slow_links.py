"""What averaging costs on slow links, between two hosts with a wire of 100 and of 10 Mbit/s: time and bytes.

    sudo python -m benchmarks.slow_links            (some 3 minutes; --quick: once each)
    python -m benchmarks.slow_links_learning OUT.json SEEDS     how well machines of unequal speed learn together

Two hosts are network namespaces. A process on each has 1.2 million float32 parameters, and averages them in turn: with
Gloo, as DDP does in every step, and by a round of `ringfort.LocalSteps` with each codec (encrypted; with the small
message in which ranks tell each other what they did). The slower rank's time counts, and the median of the rounds;
bytes are those that the first host's interface has sent. Nothing is modelled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402

from benchmarks.namespaces import INTERFACE, two_hosts, why_not  # noqa: E402

RATES = {"100 Mbit/s": 100_000_000, "10 Mbit/s": 10_000_000}
BURST = 32 * 1024
"""Bytes that may leave at once after a pause."""
PARAMETERS = 1_200_000
CODECS = ("none", "int8", "int4", "sparse")
PATIENCE = 300.0


def rank(number: int, address: str, folder: Path, rounds: int) -> None:
    """Be one rank: measure every way, and write down what each round took."""
    import torch
    import torch.distributed as dist

    import ringfort

    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    sent = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    found: dict[str, Any] = {}

    def measure(name: str, work: Callable[[int], object], meet: Callable[[], object]) -> None:
        times, nbytes = list[float](), list[int]()
        for turn in range(rounds + 1):
            meet()
            before, begun = int(sent.read_text()), time.perf_counter()
            work(turn)
            times.append(time.perf_counter() - begun)
            meet()
            nbytes.append(int(sent.read_text()) - before)
        found[name] = {"seconds": times[1:], "bytes": nbytes[1:]}  # the first one makes plans

    store = dist.TCPStore(address, 29811, 2, is_master=number == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=PATIENCE))
    flat = torch.randn(PARAMETERS)
    measure("Gloo", lambda _: dist.all_reduce(flat), dist.barrier)
    dist.destroy_process_group()
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "29812"}
    with ringfort.init() as ctx:
        for codec in CODECS:
            weights = {"w": np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)}
            local = ringfort.LocalSteps(ctx, weights, every=10, codec=codec, pace="steps")  # type: ignore[arg-type]

            def work(turn: int, local: Any = local, weights: Any = weights) -> None:
                random = np.random.default_rng((ctx.rank, turn))
                weights["w"] += 0.01 * random.standard_normal(PARAMETERS, np.float32)
                local._steps = 1  # as after a round of local steps
                local._own = 1.0
                local.end_round()

            measure(codec, work, ctx.barrier)
    (folder / f"{number}.json").write_text(json.dumps(found))


def measured(rate: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the seconds and bytes of each way on a wire of so many bits a second."""
    with tempfile.TemporaryDirectory() as name, two_hosts(rate, BURST) as hosts:
        ranks = [
            subprocess.Popen(
                [
                    *host.prefix, sys.executable, "-m", "benchmarks.slow_links", "--rank", str(number),
                    "--address", hosts[0].address, "--folder", name, "--rounds", str(rounds),
                ]
            )
            for number, host in enumerate(hosts)
        ]  # fmt: skip
        try:
            codes = [one.wait(PATIENCE) for one in ranks]
        finally:
            for one in ranks:
                one.kill()
                one.wait()
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        both = [json.loads(Path(name, f"{number}.json").read_text()) for number in range(2)]
    return {
        way: {
            "seconds": statistics.median(
                max(pair) for pair in zip(*(one[way]["seconds"] for one in both), strict=True)
            ),
            "bytes": statistics.median(both[0][way]["bytes"]),
        }
        for way in both[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Averaging on slow links.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--address")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options.rank, options.address, options.folder, options.rounds)
        return
    if (why := why_not()) is not None:
        raise SystemExit(why)
    print("| wire | way | seconds | bytes sent by a rank |\n| --- | --- | --- | --- |")
    for name, rate in RATES.items():
        for way, row in measured(rate, 1 if options.quick else options.rounds).items():
            print(f"| {name} | {way} | {row['seconds']:.3g} | {row['bytes']:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
