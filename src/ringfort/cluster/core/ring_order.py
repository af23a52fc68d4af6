"""Finds the best ring: its slowest link is as fast as possible, then its second slowest, and so on. Pure.

All links of a ring are in use in every step of a collective, so the slowest one sets the pace; their sum means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, permutations
from typing import Final

EXACT_LIMIT: Final = 8
"""Places up to which every ring is examined, in about 10 ms."""

Costs = Sequence[Sequence[float]]
"""costs[a][b] is the time that a message takes from a to b; the slower direction counts."""


def best_ring(costs: Costs, exact_limit: int = EXACT_LIMIT) -> list[int]:
    """Return the places in ring order, beginning with place 0 and its neighbour with the lower number.

    The same costs give the same ring on every machine. Up to `exact_limit` places the ring is optimal. Above that it is
    a nearest-neighbour tour improved by 2-opt.
    """
    count = len(costs)
    if count <= 3:
        return list(range(count))
    both = [[max(costs[a][b], costs[b][a]) for b in range(count)] for a in range(count)]
    if count <= exact_limit:
        rings = ([0, *rest] for rest in permutations(range(1, count)) if rest[0] < rest[-1])
        return min(rings, key=lambda ring: _slowest_first(both[a][b] for a, b in pairwise((*ring, 0))))
    ring = _improved(_nearest(both), both)
    return ring if ring[1] < ring[-1] else [ring[0], *ring[:0:-1]]  # the canonical direction


def _slowest_first(costs: Iterable[float]) -> list[float]:
    return sorted(costs, reverse=True)


def _nearest(costs: Costs) -> list[int]:
    ring, left = [0], set(range(1, len(costs)))
    while left:
        here = costs[ring[-1]]
        ring.append(min(left, key=lambda place: (here[place], place)))
        left.remove(ring[-1])
    return ring


def _improved(ring: list[int], costs: Costs) -> list[int]:
    """Apply 2-opt: reverse a part of the ring where that replaces two links by faster ones, until nothing improves."""
    count, helped = len(ring), True
    while helped:
        helped = False
        for i in range(count - 1):
            for j in range(i + 2, count - (i == 0)):
                a, b, c, d = ring[i], ring[i + 1], ring[j], ring[(j + 1) % count]
                if _slowest_first((costs[a][c], costs[b][d])) < _slowest_first((costs[a][b], costs[c][d])):
                    ring[i + 1 : j + 1] = ring[j:i:-1]
                    helped = True
    return ring
