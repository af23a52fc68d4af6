"""The best ring, against every ring there is."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings, strategies as st

from ringfort.cluster.core.ring_order import EXACT_LIMIT, best_ring

Matrix = list[list[float]]


def links(costs: Matrix, ring: tuple[int, ...] | list[int]) -> list[float]:
    """What all links of a ring cost, the slowest first."""
    return sorted(
        (max(costs[a][b], costs[b][a]) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)), reverse=True
    )


def slowest(costs: Matrix, ring: list[int]) -> float:
    return links(costs, ring)[0] if len(ring) > 1 else 0.0


def by_brute_force(costs: Matrix) -> list[float]:
    return min(links(costs, (0, *rest)) for rest in itertools.permutations(range(1, len(costs))))


@st.composite
def matrices(draw: st.DrawFn, low: int = 2, high: int = 7) -> Matrix:
    count = draw(st.integers(low, high))
    # Few values make ties, many make none; both have gone wrong in other programs.
    values = draw(st.sampled_from([st.integers(1, 3).map(float), st.floats(1e-6, 10)]))
    return [[draw(values) for _ in range(count)] for _ in range(count)]


@given(matrices())
def test_no_ring_has_a_faster_slowest_link_nor_then_a_faster_second(costs: Matrix) -> None:
    ring = best_ring(costs)
    assert sorted(ring) == list(range(len(costs)))
    assert links(costs, ring) == by_brute_force(costs)


def test_the_largest_group_that_is_exact_is_so_too_and_takes_little_time() -> None:
    rng = random.Random(1)
    costs = [[rng.choice([1.0, 2.0, 5.0, 9.0]) for _ in range(EXACT_LIMIT)] for _ in range(EXACT_LIMIT)]
    start = time.process_time()
    ring = best_ring(costs)
    assert time.process_time() - start < 0.5
    assert links(costs, ring) == by_brute_force(costs)


@given(matrices(4, 12), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_the_same_links_give_the_same_ring_whichever_way_each_was_measured(costs: Matrix, rng: random.Random) -> None:
    turned = [list(row) for row in zip(*costs, strict=True)]
    assert best_ring(costs) == best_ring(turned) == best_ring([list(row) for row in costs])


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_small_groups_have_one_ring(count: int) -> None:
    costs = [[1.0] * count for _ in range(count)]
    assert best_ring(costs) == list(range(count))
    assert slowest(costs, best_ring(costs)) == (1.0 if count > 1 else 0.0)


def test_equal_links_keep_the_order() -> None:
    assert best_ring([[1.0] * 6 for _ in range(6)]) == list(range(6))


def two_switches(count: int, rng: random.Random) -> tuple[Matrix, float]:
    """Half the places on each of two switches, a slow wire between; shuffled. With the best slowest link."""
    side = [place % 2 for place in range(count)]
    rng.shuffle(side)
    return [[1.0 if side[a] == side[b] else 10.0 for b in range(count)] for a in range(count)], 10.0


def radios(count: int, rng: random.Random) -> tuple[Matrix, float]:
    """Each place has a speed of its own, and a link is as slow as its slower end."""
    speed = [rng.choice([1.0, 1.0, 3.0, 8.0]) for _ in range(count)]
    return [[max(speed[a], speed[b]) for b in range(count)] for a in range(count)], max(speed)


def floors(count: int, rng: random.Random) -> tuple[Matrix, float]:
    """Places in a row of rooms: what is far is slow. The best ring goes up on the even and down on the odd ones."""
    place = list(range(count))
    rng.shuffle(place)
    return [[float(abs(place[a] - place[b])) for b in range(count)] for a in range(count)], 2.0


@pytest.mark.parametrize("count", [10, 16, 33])
@pytest.mark.parametrize("world", [two_switches, radios, floors])
def test_large_groups_get_the_best_slowest_link_in_worlds_like_homes(world: object, count: int) -> None:
    costs, best = world(count, random.Random(count))  # pyright: ignore[reportCallIssue]
    ring = best_ring(costs)
    assert sorted(ring) == list(range(count))
    assert slowest(costs, ring) <= best * (1.5 if world is floors else 1)


def test_two_switches_are_crossed_only_twice() -> None:
    costs, _ = two_switches(20, random.Random(5))
    assert links(costs, best_ring(costs)).count(10.0) == 2


def test_the_ring_of_a_large_group_is_not_much_slower_than_the_best() -> None:
    rng = random.Random(7)
    same = 0
    for _ in range(60):
        costs = [[rng.uniform(1, 10) for _ in range(8)] for _ in range(8)]
        best, found = slowest(costs, best_ring(costs)), slowest(costs, best_ring(costs, exact_limit=0))
        assert best <= found <= 1.5 * best
        same += found == best
    assert same >= 30


def test_a_group_of_64_hosts_is_ordered_in_a_moment() -> None:
    rng = random.Random(3)
    costs = [[float(rng.randrange(1, 40)) for _ in range(64)] for _ in range(64)]
    start = time.process_time()
    best_ring(costs)
    assert time.process_time() - start < 10
