"""A rank that calls all others in every way at once, and says how each call ended: `python -m tests.workers.rpc`."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np

import ringfort
from ringfort import RpcAgent
from ringfort.errors import DistributedError, RemoteError, RpcNoConnectionError, RpcPeerLostError, RpcTimeoutError
from ringfort.launch.local_ranks import report

THREADS = 3
AHEAD = 16
"""Calls that a thread has under way."""
PATIENCE = 120.0
"""Seconds: no call that should end by itself takes so long."""
SHORT = 0.02
LOST = ("RpcPeerLostError", "RpcNoConnectionError")


def functions(agent: RpcAgent, finished: set[int]) -> None:
    """What the others call."""
    kept: list[Any] = []

    @agent.rpc
    def echo(x: Any) -> Any:
        return x

    @agent.rpc
    def total(x: np.ndarray) -> int:
        return int(x.sum())

    @agent.rpc
    async def later(x: Any) -> Any:
        await asyncio.sleep(0.001)
        return x

    @agent.rpc
    async def hang() -> None:
        await asyncio.sleep(PATIENCE)

    @agent.rpc
    def fail(x: int) -> None:
        raise ValueError(f"no {x}")

    @agent.rpc
    def ask_back(x: int) -> int:
        call = agent.current_call()
        assert call is not None
        return agent.rpc_sync(call.peer, "echo", x) + agent.rpc_sync(call.peer, "later", 1)

    @agent.rpc
    def read(rref: Any, keep: bool) -> Any:
        kept.clear()
        kept.extend([rref] * keep)
        return rref.to_here()

    @agent.rpc
    def done(rank: int) -> None:
        kept.clear()
        finished.add(rank)


class Storm:
    """One thread's calls."""

    def __init__(self, agent: RpcAgent, seed: int, largest: int) -> None:
        self.agent = agent
        self.chance = random.Random(seed)
        self.largest = largest
        self.outcomes: Counter[str] = Counter()
        self.ends: Counter[int] = Counter()
        self.under_way: list[tuple[str, Any, Future[Any]]] = []

    def run(self, calls: int) -> None:
        for number in range(calls):
            try:
                self.call(number)
            except (RpcPeerLostError, RpcNoConnectionError):
                self.ends[number] += 1
                self.outcomes["lost"] += 1
            if len(self.under_way) >= AHEAD:
                self.settle(self.under_way.pop(0))
        while self.under_way:
            self.settle(self.under_way.pop(0))

    def call(self, number: int) -> None:
        chance, agent = self.chance, self.agent
        dst = chance.randrange(agent.world_size)
        kind = chance.choices(
            ["echo", "later", "ask_back", "fail", "nothing", "hang", "cancel", "array", "reference", "sync"],
            [40, 20, 10, 5, 5, 2, 5, 5, 5, 10],
        )[0]
        expected: Any = number
        if kind == "sync":
            assert agent.rpc_sync(dst, "echo", number, timeout=PATIENCE) == number
            self.ends[number] += 1
            self.outcomes["right"] += 1
            return
        if kind == "hang":
            future = agent.rpc_async(dst, "hang", timeout=SHORT)
        elif kind == "cancel":
            future = agent.rpc_async(dst, "hang", timeout=PATIENCE)
        elif kind == "array":
            size = self.largest if chance.random() < 0.002 else int(10 ** chance.uniform(0, 5))
            future = agent.rpc_async(dst, "total", np.ones(size, np.uint8), timeout=PATIENCE)
            expected = size
        elif kind == "reference":
            rref = agent.remote(dst, "echo", number, timeout=PATIENCE)
            third = chance.randrange(agent.world_size)
            future = agent.rpc_async(third, "read", rref, chance.random() < 0.5, timeout=PATIENCE)
        else:
            future = agent.rpc_async(dst, kind, number, timeout=PATIENCE)
            expected = number + 1 if kind == "ask_back" else number
        future.add_done_callback(lambda _: self.ends.update([number]))
        if kind == "cancel" and chance.random() < 0.9:
            future.cancel()
        elif kind == "cancel":
            threading.Timer(SHORT, future.cancel).start()
        self.under_way.append((kind, expected, future))

    def settle(self, one: tuple[str, Any, Future[Any]]) -> None:
        kind, expected, future = one
        try:
            result = future.result(2 * PATIENCE)
        except CancelledError:
            self.outcomes["right" if kind == "cancel" else "cancelled by nobody"] += 1
        except (RpcPeerLostError, RpcNoConnectionError):
            self.outcomes["lost"] += 1
        except RpcTimeoutError:
            self.outcomes["right" if kind == "hang" else f"{kind} is late"] += 1
        except RemoteError as exc:
            if kind == "fail" and exc.type_name == "ValueError":
                self.outcomes["right"] += 1
            elif exc.type_name.endswith(LOST):
                self.outcomes["lost there"] += 1
            else:
                self.outcomes[f"{kind} raised {exc}"] += 1
        except DistributedError as exc:
            is_right = kind == "nothing" and type(exc).__name__ == "FunctionNotFoundError"
            # Its value is gone with its maker: it died while it was handing the reference on.
            is_lost = kind == "reference" and "any more" in str(exc)
            self.outcomes["right" if is_right else "lost" if is_lost else f"{kind}: {exc!r}"] += 1
        else:
            self.outcomes["right" if result == expected else f"{kind} gave {result!r:.50}, not {expected}"] += 1


def storm(calls: str, largest: str, seed: str) -> None:
    """Makes `calls` calls, waits until all others have made theirs, and looks for what is left."""
    each = int(calls) // THREADS
    with ringfort.init(timeout=60) as ctx:
        agent = RpcAgent(ctx, timeout=PATIENCE)
        finished: set[int] = set()
        functions(agent, finished)
        ctx.barrier()
        report(pid=os.getpid())
        storms = [Storm(agent, int(seed) * 1000 + ctx.rank * 10 + n, int(largest)) for n in range(THREADS)]
        threads = [threading.Thread(target=one.run, args=(each,)) for one in storms]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - start
        outcomes = sum((one.outcomes for one in storms), Counter[str]())
        ends = [one.ends[number] for one in storms for number in range(each)]
        wait_for_all(agent, finished)
        left = what_is_left(agent)
        report(outcomes=outcomes, ends=dict(Counter(ends)), left=left, seconds=seconds)
        agent.close()
    until(lambda: threading.active_count() == 1, 10)
    report(threads=[t.name for t in threading.enumerate()], sockets=sockets())


def wait_for_all(agent: RpcAgent, finished: set[int]) -> None:
    """Until every rank that lives has told that it is done, and has been told."""
    peers = [peer for peer in range(agent.world_size) if peer != agent.rank]
    for peer in peers:
        try:
            agent.rpc_sync(peer, "done", agent.rank, timeout=10 * PATIENCE)
        except (RpcPeerLostError, RpcNoConnectionError):
            continue
    until(lambda: all(peer in finished or not agent.is_alive(peer) for peer in peers), 10 * PATIENCE)
    agent.rpc_sync(agent.rank, "done", agent.rank)


def what_is_left(agent: RpcAgent) -> list[int]:
    """The agent's own figures once they are zero, or when they should have been."""

    def is_clean() -> bool:
        gc.collect()
        return not any(agent.stats())

    until(is_clean, 20)
    return list(agent.stats())


def until(is_so: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)


def sockets() -> int:
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found += str(descriptor.readlink()).startswith("socket:")
        except OSError:
            continue  # the listing's own
    return found


if __name__ == "__main__":
    storm(*sys.argv[1:])
