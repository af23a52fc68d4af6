"""Ranks whose machine goes silent, or whose peer only computes: `python -m tests.workers.patience WHAT`. The
environment has the rank. Says in JSON lines what happens; a rank that must not go on waits for a line on its input."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

import ringfort
from ringfort.config import DistributedConfig
from ringfort.errors import DistributedError


def say(**what: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


def lose(ctx: ringfort.DistributedContext, nbytes: int) -> None:
    """All-reduces until one fails."""
    x = np.zeros(nbytes // 4, np.float32)
    ctx.all_reduce(x)
    say(began=True)
    try:
        while True:
            ctx.all_reduce(x)
    except DistributedError as exc:
        say(error=type(exc).__name__, peer=exc.peer, words=str(exc))


def wait(ctx: ringfort.DistributedContext) -> None:
    """Rank 0 waits for a message that never comes: nothing is under way on the connection."""
    ctx.barrier()
    say(began=True)
    if ctx.rank:
        sys.stdin.readline()
    try:
        ctx.recv(np.empty(1), 1)
    except DistributedError as exc:
        say(error=type(exc).__name__, peer=exc.peer, words=str(exc))


def call(ctx: ringfort.DistributedContext) -> None:
    """Rank 0 calls a function of rank 1 that does not end."""
    with ringfort.RpcAgent(ctx) as agent:
        agent.register("wait", sys.stdin.readline)
        ctx.barrier()
        say(began=True)
        try:
            agent.rpc_sync(1, "wait", timeout=60) if ctx.rank == 0 else sys.stdin.readline()
        except DistributedError as exc:
            say(error=type(exc).__name__, peer=exc.peer, words=str(exc))


def compute(ctx: ringfort.DistributedContext, seconds: int) -> None:
    """Rank 1 computes before it receives, so that the kernel has no room left for what rank 0 sends."""
    x = np.arange(1 << 20, dtype=np.float32)
    ctx.barrier()
    if ctx.rank == 0:
        ctx.send(x, 1)
    else:
        time.sleep(seconds)
        into = np.empty_like(x)
        ctx.recv(into, 0)
        say(same=bool((into == x).all()))


def main() -> None:
    what, *numbers = sys.argv[1:]
    does = {"lose": lose, "wait": wait, "call": call, "compute": compute}[what]
    with ringfort.init(timeout=60, config=DistributedConfig()) as ctx:
        does(ctx, *map(int, numbers))


if __name__ == "__main__":
    main()
