"""Two ranks that work until a signal interrupts one of them, over and over: `run` starts them, `python -m
tests.helpers.interrupts` is one of them.

In each round the ranks form a group and repeat the same operations. After a random time, microseconds to milliseconds,
a signal raises `KeyboardInterrupt` in one of them, wherever it is. That rank must see the exception, and close; the
other must get an error. A rank that is stuck prints where, and ends.
"""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from types import FrameType
from typing import Any

import numpy as np

from ringfort.backends.tcp import TcpBackend
from ringfort.collectives import channels
from ringfort.config import CollectiveConfig, DistributedConfig
from ringfort.context import DistributedContext
from ringfort.errors import DistributedError
from ringfort.rpc.agent import RpcAgent

KINDS = {
    "memory": DistributedConfig(timeout=60),
    "plain": DistributedConfig(timeout=60, shared_memory="off", encryption="off"),
    "encrypted": DistributedConfig(timeout=60, shared_memory="off"),
    "channels": DistributedConfig(timeout=60, shared_memory="off"),
    "connections": DistributedConfig(
        timeout=60, shared_memory="off", encryption="off", collective=CollectiveConfig(connections=3)
    ),
    "rpc": DistributedConfig(timeout=60, shared_memory="off", encryption="off"),
}
LARGE = 1_500_000
"""Elements of an array that is large enough for channels."""
BOUND = 5.0
"""Seconds from the signal to the other rank's error, and to the end of the close. Only a busy machine takes as long."""
STUCK = 30.0
"""Seconds of a round after which a rank says where it is and ends."""


def run(rounds: int, kinds: list[str], seed: int = 0) -> list[dict[str, Any]]:
    """What became of each round, as both ranks have told it. Fails if one did not end as it should."""
    ours, theirs = socket.socketpair()
    arguments = [str(rounds), ",".join(kinds), str(seed)]
    with ExitStack() as held:
        files = [[held.enter_context(tempfile.TemporaryFile("w+")) for _ in "oe"] for _ in range(2)]
        with ours, theirs:
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-m", "tests.helpers.interrupts", str(rank), str(end.fileno()), *arguments],
                    stdout=files[rank][0],
                    stderr=files[rank][1],
                    pass_fds=(end.fileno(),),
                )
                for rank, end in enumerate((ours, theirs))
            ]
        try:
            for rank in ranks:
                rank.wait(STUCK * 2 + rounds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for file in files[0] + files[1]:
            file.seek(0)
        said = [(output.read(), errors.read()) for output, errors in files]
    errors = "".join(f"\nrank {i} ended with {rank.returncode}:\n{said[i][1][-4000:]}" for i, rank in enumerate(ranks))
    assert not any(rank.returncode for rank in ranks), errors
    told = [[json.loads(line) for line in lines.splitlines()] for lines, _ in said]
    found = [{**zero, **one} for zero, one in zip(*told, strict=True)]
    assert len(found) == rounds
    for one in found:
        assert not one["swallowed"], f"the interrupt was swallowed: {one}{errors}"
        assert one["closing"] < BOUND, f"closing took long: {one}"
        assert one["error_at"] - one["fired_at"] < BOUND, f"the other rank learned of it late: {one}"
    return found


class _Alarm:
    """Raises `KeyboardInterrupt` in this thread after a random time."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self.fired_at: float | None = None

    def set(self) -> None:
        """It may come before this has returned."""
        signal.signal(signal.SIGALRM, self._fire)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(20e-6, self._longest))

    def _fire(self, signum: int, frame: FrameType | None) -> None:
        self.fired_at = time.monotonic()
        raise KeyboardInterrupt


def _collectives(ctx: DistributedContext, kind: str) -> Iterator[Callable[[], object]]:
    sizes = (1, 1024, 70_000, 300_000) if kind not in ("channels", "connections") else (1, 70_000, LARGE)
    arrays = [np.ones(size, np.float32) for size in sizes]
    peer = 1 - ctx.rank
    for turn in count():
        for array in arrays:
            yield lambda array=array: ctx.all_reduce(array)
        yield lambda: ctx.all_reduce(arrays[0], async_op=True).wait()
        if turn % 4 == 0:
            yield lambda root=turn // 4 % 2: ctx.broadcast(arrays[1], root)
            yield ctx.barrier
            yield lambda: ctx.sendrecv(arrays[0], peer, arrays[0], peer)
            works = [ctx.all_reduce(array, async_op=True) for array in arrays]
            yield from [work.wait for work in works]


def _calls(agent: RpcAgent) -> Iterator[Callable[[], object]]:
    peer, large = 1 - agent.rank, np.ones(200_000, np.float32)

    def several() -> None:
        for future in [agent.rpc_async(peer, "echo", number) for number in range(4)]:
            future.result()

    def kept() -> None:
        rref = agent.remote(peer, "echo", 5)
        assert rref.to_here() == 5

    while True:
        yield lambda: agent.rpc_sync(peer, "echo", 1)
        yield lambda: agent.rpc_sync(peer, "echo", large)
        yield several
        yield kept
        yield lambda: agent.map("echo", [1, 2, 3])


def _round(rank: int, kind: str, place: socket.socket, *, is_victim: bool, is_warm: bool) -> dict[str, object]:
    config = KINDS[kind]
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        place.sendall(b"%6d" % listener.getsockname()[1])
        backend = TcpBackend(0, 2, config=config, listener=listener)
    else:
        backend = TcpBackend(1, 2, f"127.0.0.1:{int(place.recv(6, socket.MSG_WAITALL))}", config=config)
    ctx = DistributedContext(backend)
    agent = RpcAgent(ctx) if kind == "rpc" else None
    if agent is None:
        work = _collectives(ctx, kind)
    else:
        agent.register("echo", lambda x: x)
        work = _calls(agent)
    if is_warm:  # the links are measured, and channels are open
        ctx.all_reduce(np.ones(LARGE, np.float32))
    ctx.barrier()
    try:
        return _interrupted(work) if is_victim else _bereaved(work)
    finally:
        if agent is not None:
            agent.close()
        ctx.close()


def _interrupted(work: Iterator[Callable[[], object]]) -> dict[str, object]:
    alarm = _Alarm(random.choice((0.0005, 0.004, 0.03)))
    swallowed = False
    try:
        alarm.set()
        while not swallowed:
            next(work)()
            swallowed = alarm.fired_at is not None
    except KeyboardInterrupt:
        pass
    return {"fired_at": alarm.fired_at, "swallowed": swallowed}


def _bereaved(work: Iterator[Callable[[], object]]) -> dict[str, object]:
    try:
        for step in work:
            step()
    except DistributedError as exc:
        return {"error_at": time.monotonic(), "error": type(exc).__name__, "peer": exc.peer}
    raise AssertionError("work never ends")


def main(rank: int, fd: int, rounds: int, kinds: list[str], seed: int) -> None:
    """One of the two ranks."""
    random.seed(seed * 2 + rank)
    channels.wanted = lambda table, asked: 2 if asked == "auto" else asked  # as with cores for two of each rank
    place = socket.socket(fileno=fd)
    for number in range(rounds):
        faulthandler.dump_traceback_later(STUCK, exit=True)
        kind = kinds[number % len(kinds)]
        is_victim = rank == number // len(kinds) % 2
        begun = time.monotonic()
        is_warm = kind == "channels" and number // len(kinds) // 2 % 2 == 0
        said = _round(rank, kind, place, is_victim=is_victim, is_warm=is_warm)
        if is_victim:
            assert said["fired_at"] is not None
            said["closing"] = time.monotonic() - float(str(said["fired_at"]))
        print(json.dumps({"round": number, "kind": kind, f"took_{rank}": time.monotonic() - begun, **said}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(","), int(sys.argv[5]))
