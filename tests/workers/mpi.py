"""One rank of the conformance checks over MPI: `mpiexec -n 4 python -m tests.workers.mpi FOLDER [CHECK...]`.

All checks run under one launch, each on a group of its first ranks. A rank writes what went wrong to FOLDER/RANK.json.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpi4py import MPI

from ringfort import DistributedConfig, MpiBackend
from ringfort.testing import ALL_CHECKS
from ringfort.testing.check import CHECK_TIMEOUT, in_words

PATIENCE = 100.0
"""Seconds for all checks: the launch is given a little more."""
LOOK = 0.002
"""Seconds between two looks whether the others are done: MPI's own barrier would take a core from them."""


def wait_for_all() -> None:
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(LOOK)


def run(name: str, comm: Any) -> str | None:
    config = DistributedConfig(timeout=CHECK_TIMEOUT)
    config = replace(config, collective=replace(config.collective, native_bytes=0))
    try:
        with MpiBackend(comm, config=config) as backend:
            ALL_CHECKS[name].run_rank(backend)
    except BaseException as exc:
        return in_words(exc)
    return None


def main() -> None:
    folder, *names = sys.argv[1:]
    # A hang ends the launch, with the stack of each thread.
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    world = MPI.COMM_WORLD
    comms = {n: world.Create_group(world.group.Incl(range(n))) for n in range(1, 5) if world.rank < n}
    outcomes: dict[str, str | None] = {}
    for name in names or ALL_CHECKS:
        ranks = ALL_CHECKS[name].ranks
        if world.rank < ranks:
            outcomes[name] = run(name, comms[ranks])
        wait_for_all()
    Path(folder, f"{world.rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
