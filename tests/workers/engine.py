"""A rank over Gloo or MPI that sees another one die: `python -m tests.workers.engine gloo RANK WORLD_SIZE MASTER`, or
`mpiexec ... python -m tests.workers.engine mpi`. Rank 1 kills itself in the middle; the others say what they were told.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

from ringfort import DistributedConfig, DistributedContext, GlooBackend, MpiBackend, PeerLostError

TURNS = 5
BYTES = 4 << 20
"""Large enough for the engine's own collectives."""


def connect(engine: str, arguments: list[str]) -> Any:
    config = DistributedConfig(timeout=30.0)
    if engine == "mpi":
        return MpiBackend(config=config)
    rank, world_size, master = arguments
    return GlooBackend(int(rank), int(world_size), master, config=config)


def main() -> None:
    engine, *arguments = sys.argv[1:]
    context = DistributedContext(connect(engine, arguments))
    for turn in range(100):
        if context.rank == 1 and turn == TURNS:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            context.all_reduce(np.ones(BYTES // 4, np.float32))
        except PeerLostError as exc:
            # One write, so that the ranks' lines do not mix.
            sys.stdout.write(f"rank {context.rank} lost {exc.peer} after {time.monotonic() - start:.1f} s\n")
            break
    sys.stdout.flush()
    context.close()
    os._exit(0)  # MPI's own farewell would wait for the dead


if __name__ == "__main__":
    main()
