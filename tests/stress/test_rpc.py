"""A hundred thousand calls of all sizes under kills."""

from __future__ import annotations

import random

from ringfort.config import MIB
from tests.helpers.storms import storm


def test_a_hundred_thousand_calls_end_once_each_under_random_kills() -> None:
    ended, seed = 0, 0
    while ended < 100_000:
        ended += storm(6000, 64 * MIB, seed, kill_after=random.Random(seed).uniform(0.0, 10.0))
        seed += 1


def test_a_rank_that_is_killed_at_any_moment_from_the_first() -> None:
    for seed in range(100, 120):
        storm(120, MIB, seed, kill_after=random.Random(seed).uniform(0.0, 0.3))
