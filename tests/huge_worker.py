"""A rank that moves arrays of more than 2 GiB: `python -m tests.huge_worker NBYTES`, started by `LocalRanks`."""

from __future__ import annotations

import resource
import sys

import numpy as np

import ringfort
from ringfort.local import report
from ringfort.transport.fold import Array


def marks(x: Array) -> list[float]:
    """The first, the last, and those around the 31st and 32nd bit of a count of bytes."""
    places = [0, len(x) // 2, len(x) - 1]
    for bits in (31, 32):
        edge = 2**bits // x.itemsize
        places += [place for place in (edge - 1, edge, edge + 1) if place < len(x)]
    return [float(x[place]) for place in places]


def rank_main(nbytes: int) -> None:
    """Each way of moving once; reports the peak of the memory beside the arrays."""
    with ringfort.init(timeout=240) as ctx:
        other = 1 - ctx.rank
        x = np.empty(nbytes // 4, np.float32)

        def peak() -> int:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

        x[...] = ctx.rank + 1
        ctx.all_reduce(np.ones(1 << 20, np.float32))
        before = peak()
        ctx.all_reduce(x)
        assert set(marks(x)) == {3.0}
        x[...] = ctx.rank + 5
        ctx.broadcast(x, root=1)
        assert set(marks(x)) == {6.0}
        if ctx.rank == 0:
            x[...] = 9
            ctx.send(x, other)
        else:
            ctx.recv(x, other)
        assert set(marks(x)) == {9.0}
        grown = peak() - before
        x[...] = ctx.rank
        gathered = ctx.all_gather(x)
        assert set(marks(gathered[0])) == {0.0}
        assert set(marks(gathered[1])) == {1.0}
        report(grown=grown)


if __name__ == "__main__":
    rank_main(int(sys.argv[1]))
