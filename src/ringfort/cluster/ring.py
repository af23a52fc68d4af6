"""The best ring through some places: its slowest link is as fast as can be, then its second slowest, and so on. Pure.

All links of a ring work at the same time in every step of a collective, so the slowest sets the pace and the sum of
them means nothing. Which ring has the fastest slowest link is the bottleneck travelling salesman's problem.

Comparing rings by all their links, slowest first, is comparing sums, if each cost is replaced by a weight that is
larger than all weights of cheaper links together can be. Python's integers have room for that, and then the usual
methods for the shortest tour apply unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

EXACT_LIMIT: Final = 9
"""Places up to which every ring is considered, in some 4 ms; each place more takes 2.3 times as long."""
_MOST_STARTS: Final = 8
"""First tours that are improved when there are more places. More find better rings rarely."""
_STARTS_BELOW: Final = 128
"""Places times starts: so 64 places take 50 ms, and 256, improved from one start, half a second."""

Costs = Sequence[Sequence[float]]
"""costs[a][b] is the time that a message takes between a and b; the worse of both ways counts."""


def best_ring(costs: Costs) -> list[int]:
    """The places in order, from place 0 on, towards the neighbour with the lower number first.

    The same costs give the same ring on every machine. Exact up to `EXACT_LIMIT` places, above that as good as local
    search gets.
    """
    count = len(costs)
    if count <= 3:
        return list(range(count))
    weights = _weights(costs)
    ring = _exact(weights) if count <= EXACT_LIMIT else _searched(weights)
    return _turned(ring)


def _weights(costs: Costs) -> list[list[int]]:
    """Each cost as an integer that exceeds any ring's worth of the next lower one."""
    count = len(costs)
    both = [[max(costs[a][b], costs[b][a]) for b in range(count)] for a in range(count)]
    distinct = sorted({both[a][b] for a in range(count) for b in range(a)})
    weight = {cost: (count + 1) ** place for place, cost in enumerate(distinct)}
    return [[0 if a == b else weight[both[a][b]] for b in range(count)] for a in range(count)]


def _exact(weights: list[list[int]]) -> list[int]:
    """Held and Karp: the best way through every set of places, from small sets to large. Place 0 begins all of them."""
    count = len(weights)
    others = range(1, count)
    best: dict[tuple[int, int], tuple[int, int]] = {(1 << place, place): (weights[0][place], 0) for place in others}
    for visited in range(2, 1 << count, 2):
        for last in others:
            before = visited & ~(1 << last)
            if not visited >> last & 1 or not before:
                continue
            best[visited, last] = min(
                (best[before, place][0] + weights[place][last], place) for place in others if before >> place & 1
            )
    visited = (1 << count) - 2
    _, last = min((best[visited, place][0] + weights[place][0], place) for place in others)
    ring = [0]
    while last:
        ring.append(last)
        visited, last = visited & ~(1 << last), best[visited, last][1]
    return ring


def _searched(weights: list[list[int]]) -> list[int]:
    """Tours that always go to the nearest place, from several beginnings, each improved until nothing helps."""
    count = len(weights)
    starts = max(1, min(_MOST_STARTS, _STARTS_BELOW // count))
    tours = [_improved(_nearest(weights, start * count // starts), weights) for start in range(starts)]
    return min(tours, key=lambda tour: (_length(tour, weights), _turned(tour)))


def _nearest(weights: list[list[int]], start: int) -> list[int]:
    tour = [start]
    left = set(range(len(weights))) - {start}
    while left:
        here = weights[tour[-1]]
        tour.append(min(left, key=lambda place: (here[place], place)))
        left.remove(tour[-1])
    return tour


def _improved(tour: list[int], weights: list[list[int]]) -> list[int]:
    while _reversed_part(tour, weights) or _moved_part(tour, weights):
        pass
    return tour


def _reversed_part(tour: list[int], weights: list[list[int]]) -> bool:
    """2-opt: turn one part of the tour around wherever that helps."""
    count = len(tour)
    helped = False
    for i in range(count - 1):
        for j in range(i + 2, count - (i == 0)):
            a, b, c, d = tour[i], tour[i + 1], tour[j], tour[(j + 1) % count]
            if weights[a][c] + weights[b][d] < weights[a][b] + weights[c][d]:
                tour[i + 1 : j + 1] = tour[j:i:-1]
                helped = True
    return helped


def _moved_part(tour: list[int], weights: list[list[int]]) -> bool:
    """Or-opt: move one to three neighbours, either way round, to where they cost least; the first move that helps."""
    count = len(tour)
    for size in (1, 2, 3):
        for i in range(count):
            turned = tour[i:] + tour[:i]
            part, rest = turned[:size], turned[size:]
            gain = (
                weights[rest[-1]][part[0]] + weights[part[-1]][rest[0]] - weights[rest[-1]][rest[0]]
            )  # what leaving saves
            for j in range(len(rest) - 1):
                a, b = rest[j], rest[j + 1]
                for way in (part, part[::-1]):
                    if weights[a][way[0]] + weights[way[-1]][b] - weights[a][b] < gain:
                        tour[:] = rest[: j + 1] + way + rest[j + 1 :]
                        return True
    return False


def _length(tour: Sequence[int], weights: list[list[int]]) -> int:
    return sum(weights[a][b] for a, b in zip(tour, (*tour[1:], tour[0]), strict=True))


def _turned(ring: list[int]) -> list[int]:
    """The same ring, written one way of its many."""
    first = ring.index(0)
    ring = ring[first:] + ring[:first]
    return ring if ring[1] < ring[-1] else [ring[0], *ring[:0:-1]]
