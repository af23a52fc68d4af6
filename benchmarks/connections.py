"""What several connections between two ranks, and both ways round a ring, gain where one does not fill the wire.

All numbers of connections are measured in the same processes, one group each, which take turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.namespaces import CABLE_RATE, FLOW_RATE, cabled_hosts, held_back_hosts
from ringfort.backends.tcp import TcpBackend
from ringfort.bench.engines.base import Host
from ringfort.collectives import channels
from ringfort.config import AllReduceStrategy, CollectiveConfig, DistributedConfig, format_address
from ringfort.context import DistributedContext

NBYTES = 32 << 20
"""More than `auto` wants to see before it decides."""
WAYS: tuple[int | str, ...] = (1, 2, 4, "auto")
WARM_UP = 3 * channels.TRIALS
"""Rounds in which `auto` compares numbers of connections."""
FIRST_PORT = 29_600
SECONDS = 120
"""For a rank to end: a round takes about 5."""


def measure(rounds: int) -> dict[str, Any]:
    """One cell for each network and number of connections: milliseconds of an all-reduce."""
    cells: list[dict[str, Any]] = []
    for network, make in (("flows", held_back_hosts), ("cables", cabled_hosts)):
        with make() as hosts:
            cells += [{"network": network, "ranks": len(hosts), **cell} for cell in _run(hosts, rounds)]
    return {"bytes": NBYTES, "flow_rate": FLOW_RATE, "cable_rate": CABLE_RATE, "cells": cells}


def _run(hosts: Sequence[Host], rounds: int) -> list[dict[str, Any]]:
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank, host in enumerate(hosts):
            arguments = [str(rank), str(len(hosts)), hosts[0].address, str(rounds)]
            command = [*host.prefix, sys.executable, "-m", "benchmarks.connections", *arguments]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        said = [process.communicate(timeout=SECONDS)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"a rank ended with {[process.returncode for process in ranks]}")
    return json.loads(said[0])


def rank_main(rank: int, world_size: int, address: str, rounds: int) -> None:
    """One rank; the first prints what was found."""
    groups: dict[int | str, DistributedContext] = {}
    for number, way in enumerate(WAYS):
        collective = CollectiveConfig(all_reduce=AllReduceStrategy.RING, connections=way)  # pyright: ignore[reportArgumentType]
        # Namespaces of one machine could share memory; machines cannot.
        config = DistributedConfig(shared_memory="off", collective=collective)
        master = format_address(address, FIRST_PORT + number)
        groups[way] = DistributedContext(TcpBackend(rank, world_size, master, config=config))
    x = np.zeros(NBYTES // 4, np.float32)
    times: dict[int | str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + WARM_UP):
        for way in WAYS[:: 1 if turn % 2 == 0 else -1]:
            groups[1].barrier()
            start = time.perf_counter()
            groups[way].all_reduce(x)
            times[way].append((time.perf_counter() - start) * 1e3)
    used = {way: channels.count_for(context.group, NBYTES) if way == "auto" else way for way, context in groups.items()}
    for group in groups.values():
        group.close()
    if rank == 0:
        # The first rounds warm up, and in them `auto` finds out.
        medians = {way: statistics.median(taken[WARM_UP:]) for way, taken in times.items()}
        cells = [{"connections": way, "used": used[way], "median_ms": medians[way]} for way in WAYS]
        print(json.dumps(cells))


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
