"""Two ranks, of which rank 0 goes without a word: `python -m tests.workers.quitters HOW WHAT`, started by `LocalRanks`.

With `fork` it forks a child, which lives on, and is killed. With `drop` it drops its last reference to the group and
lives on. `WHAT` they use is `numpy` or `rpc`. Rank 1 says what it was told.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ringfort
from ringfort.errors import DistributedError
from ringfort.launch.local_ranks import report
from ringfort.rpc.agent import RpcAgent

TIMEOUT = 60


def numpy_group() -> tuple[Any, Callable[[Any], object]]:
    """A group, and how to use it."""
    return ringfort.init(timeout=TIMEOUT), lambda ctx: [ctx.all_reduce(np.ones(n, np.float32)) for n in (4, 200_000)]


def agents() -> tuple[Any, Callable[[Any], object]]:
    """An agent that answers, beside its group."""
    ctx = ringfort.init(timeout=TIMEOUT)
    agent = RpcAgent(ctx)
    is_called = threading.Event()

    def hold() -> None:
        is_called.set()
        threading.Event().wait(TIMEOUT)

    def use(agent: Any) -> None:
        if agent.rank == 1:  # in the middle of this call rank 0 goes
            agent.rpc_sync(0, "hold")
        assert agent.rpc_sync(1, "echo", -1) == 1
        assert is_called.wait(TIMEOUT)

    agent.register("echo", abs)
    agent.register("hold", hold)
    ctx.barrier()
    agent.context = ctx  # type: ignore[attr-defined]  # both go together
    return agent, use


def main(how: str, what: str) -> None:
    """One of the two ranks."""
    group, use = {"numpy": numpy_group, "rpc": agents}[what]()
    if os.environ["RANK"] == "1":
        try:
            while True:
                use(group)
        except DistributedError as exc:
            report(error=type(exc).__name__, peer=exc.peer, at=time.monotonic())
        return
    for _ in range(3):
        use(group)
    if how == "fork":
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            live_on(group, use, writing)
        words = os.read(reading, 1000).decode()
        report(child=child, words=words, at=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    report(at=time.monotonic())
    del group
    signal.pause()


def live_on(group: Any, use: Callable[[Any], object], writing: int) -> None:
    """The child: says what its use of the group came to, and outlives its parent."""
    for output in (1, 2):  # else whoever reads what the parent says would wait for the child
        os.close(output)
    try:
        use(group)
        words = "it worked"
    except BaseException as exc:
        words = f"{type(exc).__name__}: {exc}"
    os.write(writing, words.encode())
    os.setsid()
    signal.alarm(TIMEOUT)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
