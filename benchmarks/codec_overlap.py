"""What it is worth to encode and decode while messages are on the wire: compressed all-reduces between two hosts.

    sudo python -m benchmarks.codec_overlap

Two hosts are network namespaces joined by a wire. Both ways take turns in the same two processes, with the codec in the
thread that sends, and beside it; a time is the slower host's, and the median counts. What a shaper lets through at once
after a pause makes up for pauses of the codec, as no wire does. So there are small bursts too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before NumPy is imported

import numpy as np  # noqa: E402

import ringfort  # noqa: E402
from benchmarks.compression import RATES  # noqa: E402
from benchmarks.namespaces import two_hosts, why_not  # noqa: E402
from ringfort.compression import exchange  # noqa: E402

WIRES = {
    **RATES,
    "100 Mbit/s, small bursts": (100_000_000, 16 * 1024),
    "1 Gbit/s, small bursts": (1_000_000_000, 64 * 1024),
}
"""Bits a second each way, and the bytes that may leave at once after a pause."""
SIZES = 16, 64
"""MiB of float32."""
CODECS = "int8", "int4"
WAYS = {"in turn": 1 << 62, "overlapped": exchange.WORTH_A_THREAD}
"""From how many bytes of a message the codec has a thread."""
PATIENCE = 300.0


def rank(rounds: int) -> dict[str, Any]:
    """One rank: the seconds of every all-reduce, the slower rank's."""
    found: dict[str, list[float]] = {}
    with ringfort.init() as ctx:
        for mib in SIZES:
            x = np.random.default_rng(ctx.rank).standard_normal(mib * 2**18).astype(np.float32)
            work = np.empty_like(x)
            for codec in CODECS:
                compressors = {way: ringfort.GradientCompressor(codec) for way in WAYS}
                for turn in range(-1, rounds):  # the first warms up
                    for way in list(WAYS)[:: 1 if turn % 2 == 0 else -1]:
                        work[...] = x
                        exchange.WORTH_A_THREAD = WAYS[way]  # type: ignore[misc]
                        ctx.barrier()
                        start = time.perf_counter()
                        ctx.all_reduce(work, compression=compressors[way], name="x")
                        taken = np.array([time.perf_counter() - start])
                        ctx.all_reduce(taken, ringfort.ReduceOp.MAX)
                        if turn >= 0:
                            found.setdefault(f"{mib} MiB, {codec}, {way}", []).append(float(taken[0]))
    return {what: float(np.median(seconds)) * 1e3 for what, seconds in found.items()}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec_overlap", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", default=";".join(WIRES), help="wires, with semicolons [%(default)s]")
    given = parser.parse_args()
    if given.rank:
        print(json.dumps(rank(given.rounds)))
        return 0
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    for name in given.only.split(";"):
        with two_hosts(*WIRES[name]) as hosts, tempfile.TemporaryDirectory() as home:
            words = [sys.executable, "-m", "benchmarks.codec_overlap", "--rank", "--rounds", str(given.rounds)]
            place = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29512"}
            running = [
                subprocess.Popen(
                    [*host.prefix, *words],
                    env={**os.environ, **place, "RANK": str(number), "RINGFORT_HOME": home},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for number, host in enumerate(hosts)
            ]
            try:
                outputs = [process.communicate(timeout=PATIENCE)[0] for process in running]
            finally:
                for process in running:
                    if process.poll() is None:
                        process.kill()
                        process.communicate()
        found = json.loads(outputs[0].splitlines()[-1])
        for mib in SIZES:
            for codec in CODECS:
                before, after = (found[f"{mib} MiB, {codec}, {way}"] for way in WAYS)
                print(f"{name}; {mib} MiB, {codec}: {before:.0f} ms in turn, {after:.0f} ms overlapped", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
