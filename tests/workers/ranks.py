"""What ranks do in tests with real processes: `python -m tests.workers.ranks NAME ARGUMENTS`, by `LocalRanks`."""

from __future__ import annotations

import os
import resource
import select
import sys
import threading
import time
from pathlib import Path

import numpy as np

import ringfort
from ringfort import ReduceOp
from ringfort.collectives import channels
from ringfort.config import AllReduceStrategy, BroadcastStrategy, CollectiveConfig, DistributedConfig
from ringfort.errors import DistributedError
from ringfort.launch.local_ranks import report


def reduce_until_killed(nbytes: str, connections: str) -> None:
    """All-reduces for ever; whoever is left says what it was told and how long after the last good one."""
    with ringfort.init(config=_striped(connections), timeout=30) as ctx:
        x = np.ones(int(nbytes) // 4, np.float32)
        report(pid=os.getpid())
        try:
            while True:
                ctx.all_reduce(x)
                x.fill(1)
                report(step=True)
        except DistributedError as exc:
            report(error=type(exc).__name__, peer=exc.peer, words=str(exc), at=time.monotonic())
    report(threads=threading.active_count(), sockets=_descriptors("socket:"), segments=_descriptors("/memfd:"))


def _striped(connections: str) -> DistributedConfig:
    """With `auto`, as on a machine with cores for two channels of each rank."""
    if connections == "auto":
        channels.wanted = lambda table, asked: 2
        return DistributedConfig()
    return DistributedConfig(collective=CollectiveConfig(connections=int(connections)))


def _descriptors(kind: str) -> int:
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found += str(descriptor.readlink()).startswith(kind)
        except OSError:
            continue  # the listing's own
    return found


def memory(nbytes: str, connections: str) -> None:
    """One large all-reduce; reports how far it raised the peak of the process's memory."""
    with ringfort.init(config=_striped(connections)) as ctx:
        x = np.ones(int(nbytes) // 4, np.float32)
        ctx.all_reduce(np.ones(1 << 20, np.float32))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ctx.all_reduce(x)
        assert x[0] == x[-1] == ctx.world_size
        report(grown_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def forget_to_close(shared_memory: str, connections: str, how: str) -> None:
    """Rank 0 closes nothing and ends in the middle of a broadcast: it has done its part, and rank 1 waits for rank 2.
    Then, unless that is all, the others find out that it is missing from the next one."""
    ctx = ringfort.init(config=_striped(connections), timeout=30, shared_memory=shared_memory)
    x = np.full(300_000, ctx.rank, np.float32)
    pid = np.array([os.getpid()])
    if ctx.rank == 0:
        ctx.send(pid, 2)
        ctx.recv(pid, 2)  # somebody waits for this process: it cannot be gone before that
    elif ctx.rank == 2:
        ctx.recv(pid, 0)
        ended = select.poll()
        ended.register(os.pidfd_open(int(pid[0])), select.POLLIN)
        ctx.send(pid, 0)
        assert ended.poll(30_000), "rank 0 has not ended"
    ctx.broadcast(x, 0, strategy=BroadcastStrategy.RING)
    report(total=float(x.sum()))
    if ctx.rank == 0 and how == "fails":
        raise ValueError("a mistake in the program")
    if ctx.rank != 0 and how != "ends":
        try:
            ctx.all_reduce(x)
        except DistributedError as exc:
            report(error=type(exc).__name__, peer=exc.peer)


def fork() -> None:
    """A child that ends as programs do, while the group goes on."""
    ctx = ringfort.init(timeout=30, shared_memory="off")
    child = os.fork()
    if child == 0:
        sys.exit()  # with all that is to be done at exit
    assert os.waitpid(child, 0)[1] == 0
    report(total=float(ctx.all_reduce(np.ones(1))[0]))
    ctx.close()


def connect() -> None:
    """Reports when it began to connect and when it had."""
    init = ringfort.init  # loads the library: eight processes on two cores take longer for that than to connect
    start = time.monotonic()
    with init() as ctx:
        report(start=start, end=time.monotonic())
        ctx.barrier()


def speed() -> None:
    """Reports how fast all-reduces of 4 MiB go, for two seconds."""
    with ringfort.init(timeout=60) as ctx:
        x = np.ones(1 << 20, np.float32)
        ctx.all_reduce(x)
        done, start = 0, time.monotonic()
        is_over = np.zeros(1, np.int8)
        while not is_over[0]:
            for _ in range(5):
                ctx.all_reduce(x)
            done += 5 * x.nbytes
            is_over[0] = time.monotonic() - start > 2
            ctx.broadcast(is_over)
        report(gigabytes_per_second=done / (time.monotonic() - start) / 1e9)


def between_hosts(nbytes: str, times: str) -> None:
    """All-reduces on several hosts as if each rank had cores for two channels. Reports what went where, and after that
    who was lost."""
    channels.wanted = lambda table, asked: 2
    with ringfort.init(timeout=60) as ctx:
        x = np.full(int(nbytes) // 4, ctx.rank + 1, np.int32)
        way = AllReduceStrategy.HIERARCHICAL  # `auto` takes it where the hosts have cores to spare
        ctx.all_reduce(x, strategy=way)
        total, before, begun = int(x[0]), _loopback(), time.monotonic()
        assert (x == total).all()
        for _ in range(int(times)):
            ctx.all_reduce(x, ReduceOp.MAX, strategy=way)
        seconds = time.monotonic() - begun
        kept = ctx.group.part(channels._Kept).channels
        peers = sorted({peer for one in kept.all for peer in (one.before, one.behind)}) if kept else []
        used = channels.count_for(ctx.group, x.nbytes)
        found = {"hosts": list(ctx.group.hosts), "peers": peers, "threads": threading.active_count() - 1}
        found |= {"rank": ctx.rank, "pid": os.getpid(), "total": total, "used": used, "seconds": seconds}
        report(**found, loopback=_loopback() - before)
        try:
            while True:
                ctx.all_reduce(x, ReduceOp.MAX, strategy=way)
        except DistributedError as exc:
            report(error=type(exc).__name__, peer=exc.peer, at=time.monotonic())


def _loopback() -> int:
    """Bytes that went over this host's loopback interface."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


WORKERS = {
    worker.__name__: worker
    for worker in (reduce_until_killed, forget_to_close, fork, memory, connect, speed, between_hosts)
}

if __name__ == "__main__":
    WORKERS[sys.argv[1]](*sys.argv[2:])
