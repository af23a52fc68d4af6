"""A rank that moves arrays of more than 2 GiB: `python -m tests.workers.huge NBYTES`, started by `LocalRanks`."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

import ringfort
from ringfort.context import DistributedContext
from ringfort.errors import CollectiveMismatchError, SizeMismatchError
from ringfort.launch.local_ranks import report
from ringfort.transport.reducer import Array


def marks(x: Array) -> list[float]:
    """The first, the last, and those around the 31st and 32nd bit of a count of bytes."""
    places = [0, len(x) // 2, len(x) - 1]
    for bits in (31, 32):
        edge = 2**bits // x.itemsize
        places += [place for place in (edge - 1, edge, edge + 1) if place < len(x)]
    return [float(x[place]) for place in places]


def peak() -> int:
    """Bytes of memory that this process has had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rank_main(nbytes: int) -> None:
    """Each way of moving once; reports the peak of the memory beside the arrays, and how long each took."""
    with ringfort.init(timeout=240) as ctx:
        other = 1 - ctx.rank
        x = np.empty(nbytes // 4, np.float32)
        seconds: dict[str, float] = {}

        def timed(name: str, work: Callable[[], object]) -> None:
            ctx.barrier()
            start = time.perf_counter()
            work()
            seconds[name] = time.perf_counter() - start

        x[...] = ctx.rank + 1
        ctx.all_reduce(np.ones(1 << 20, np.float32))
        before = peak()
        timed("all_reduce", lambda: ctx.all_reduce(x))
        assert set(marks(x)) == {3.0}
        x[...] = ctx.rank + 5
        timed("broadcast", lambda: ctx.broadcast(x, root=1))
        assert set(marks(x)) == {6.0}
        if ctx.rank == 0:
            x[...] = 9
        timed("send", lambda: ctx.send(x, other) if ctx.rank == 0 else ctx.recv(x, other))
        assert set(marks(x)) == {9.0}
        refuse_what_only_looks_alike(ctx, x)
        grown = peak() - before
        x[...] = ctx.rank
        gathered = ctx.all_gather(x)
        assert set(marks(gathered[0])) == {0.0}
        assert set(marks(gathered[1])) == {1.0}
        del gathered
        disagree(ctx, x)
        report(grown=grown, seconds=seconds)


def refuse_what_only_looks_alike(ctx: DistributedContext, x: Array) -> None:
    """A buffer whose size is the message's in 31 bits is not its size: an error, and the next message is whole."""
    small = x[: (x.nbytes - 2**31) // 4]
    if ctx.rank == 0:
        x[...] = 7
        ctx.send(x, 1)
        ctx.send(small, 1)
        return
    with pytest.raises(SizeMismatchError) as caught:
        ctx.recv(small, 0)
    assert (caught.value.expected, caught.value.got) == (small.nbytes, x.nbytes)
    assert set(marks(x)) == {9.0}, "nothing of it was written"
    ctx.recv(small, 0)
    assert set(marks(small)) == {7.0}
    assert x[len(small)] == 9.0


def disagree(ctx: DistributedContext, x: Array) -> None:
    """Ranks whose arrays have the same size in 31 bits do not agree."""
    with pytest.raises(CollectiveMismatchError):
        ctx.all_reduce(x if ctx.rank == 0 else x[: (x.nbytes - 2**31) // 4])


if __name__ == "__main__":
    rank_main(int(sys.argv[1]))
