"""How fast a burst was, from when its pieces came."""

from __future__ import annotations

import pytest

from ringfort.cluster.net.probing import speed_of

PIECE = 65536
GIGABIT = PIECE / 125e6
"""Seconds that a piece takes on gigabit Ethernet."""


def steady(pieces: int, seconds: float, begin: float = 0.0) -> list[float]:
    return [begin + number * seconds for number in range(pieces)]


def megabits(arrivals: list[float]) -> float:
    return speed_of(arrivals, arrivals[-1], PIECE) * 8e-6


def test_a_steady_burst_has_the_speed_of_the_wire() -> None:
    assert megabits(steady(64, GIGABIT)) == pytest.approx(1000)


def test_what_a_rate_limit_lets_pass_at_once_does_not_count() -> None:
    bucket = steady(16, GIGABIT / 20)
    rest = steady(48, GIGABIT, bucket[-1] + GIGABIT)
    assert megabits([*bucket, *rest]) == pytest.approx(1000, rel=0.05)


def test_what_a_pause_of_this_machine_has_piled_up_does_not_make_the_wire_faster() -> None:
    late = 32 * GIGABIT  # it looked for the first time when half of the burst was there
    assert megabits([0.0, *steady(31, GIGABIT / 50, late), *steady(32, GIGABIT, late + GIGABIT)]) <= 1010


@pytest.mark.parametrize(("arrivals", "expected"), [([0.0, 0.5], PIECE / 0.5), ([0.0, 0.5, 1.0], PIECE / 0.5)])
def test_a_slow_link_is_measured_by_the_few_pieces_that_came(arrivals: list[float], expected: float) -> None:
    assert speed_of(arrivals, 1.0, PIECE) == pytest.approx(expected)


def test_one_piece_is_measured_against_the_end_of_the_burst() -> None:
    assert speed_of([1.0], 1.5, PIECE) == pytest.approx(PIECE / 0.5)
