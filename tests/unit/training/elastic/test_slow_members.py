"""Which member is set aside, from the tokens of the steps. Times are in microseconds."""

from __future__ import annotations

import pytest

from ringfort.training.elastic.protocol import Token
from ringfort.training.elastic.slow_members import GRACE, STEPS, Slow, SlowMembers

MICROBATCH, SAMPLES = 10, 80


def token(speed: int, *, parts: int = 1, overhead: int = 0, period: int = 1_000_000) -> Token:
    return Token((), covered=frozenset(range(parts)), speed=speed, overhead=overhead, period=period)


def until_aside(judge: SlowMembers, tokens: list[Token], limit: int = 1000) -> tuple[int, Slow] | None:
    """Return the number of steps after which a member leaves, and which one."""
    for step in range(1, limit):
        slow = judge.sealed(SAMPLES, tokens)
        if slow is not None:
            return step, slow
    return None


def test_a_member_that_needs_longer_for_one_micro_batch_than_two_steps_of_the_others_leaves_after_the_grace() -> None:
    tokens = [token(100, parts=4), token(100, parts=4), token(10, parts=0)]
    # The others: 80 samples at 200 per second, and 0.6 s of each step are communication.
    assert until_aside(SlowMembers(MICROBATCH, 3, 1), tokens) is None
    slower = [*tokens[:2], token(3, parts=0)]
    assert until_aside(SlowMembers(MICROBATCH, 3, 1), slower) == (GRACE // 1_000_000, Slow(2, 3_933_333, 1_000_000))


@pytest.mark.parametrize(("overhead", "leaves"), [(1_875_000, False), (1_875_001, True)])
def test_too_slow_is_more_than_twice_a_step_of_the_others(overhead: int, leaves: bool) -> None:
    # Without it 1 s, with it 0.125 s for a micro-batch and the rest.
    tokens = [token(80, parts=8, period=0), token(80, parts=0, overhead=overhead, period=0)]
    slow = SlowMembers(MICROBATCH, 2, 1)._too_slow(SAMPLES, tokens)
    assert bool(slow) == leaves


def test_a_member_that_does_something_useful_stays_however_slow_it_is() -> None:
    # One micro-batch takes it 0.9 s, while the others need 1 s for the whole step.
    tokens = [token(80, parts=7), token(11, parts=1)]
    assert until_aside(SlowMembers(MICROBATCH, 2, 1), tokens) is None


def test_time_outside_micro_batches_counts() -> None:
    tokens = [token(80, parts=4), token(80, parts=4, overhead=9_000_000, period=10_000_000)]
    tokens[0] = token(80, parts=4, period=10_000_000)
    found = until_aside(SlowMembers(MICROBATCH, 2, 1), tokens)
    assert found is not None
    assert (found[0], found[1].rank) == (STEPS, 1)  # ten seconds each: the grace is over sooner than five steps


def test_nobody_leaves_below_the_minimum_and_nobody_is_left_alone_with_an_unknown_speed() -> None:
    tokens = [token(100, parts=8), token(1, parts=0)]
    assert until_aside(SlowMembers(MICROBATCH, 2, 2), tokens) is None
    assert until_aside(SlowMembers(MICROBATCH, 1, 1), tokens[:1]) is None
    assert until_aside(SlowMembers(MICROBATCH, 2, 1), [token(0, parts=0), token(1, parts=8)]) is None


def test_one_step_that_is_fast_enough_begins_the_grace_again() -> None:
    judge, slow = SlowMembers(MICROBATCH, 2, 1), [token(100, parts=8), token(1, parts=0)]
    steps = GRACE // 1_000_000
    assert until_aside(judge, slow, steps) is None
    assert judge.sealed(SAMPLES, [token(100), token(100)]) is None
    found = until_aside(judge, slow)
    assert found is not None
    assert found[0] == steps


@pytest.mark.parametrize("speeds", [(100, 1, 2), (100, 2, 1)])
def test_of_several_the_slowest_leaves_first(speeds: tuple[int, ...]) -> None:
    found = until_aside(SlowMembers(MICROBATCH, 3, 1), [token(speed, parts=0) for speed in speeds])
    assert found is not None
    assert found[1].rank == speeds.index(1)


def test_a_run_whose_time_is_communication_sets_nobody_aside() -> None:
    tokens = [token(100, parts=8, period=10_000_000), token(4, parts=0, period=10_000_000)]
    assert until_aside(SlowMembers(MICROBATCH, 2, 1), tokens) is None


def test_the_reason_is_said_in_seconds() -> None:
    assert str(Slow(1, 3_140_000, 250_000)) == "a step with it takes at least 3.14 s, one without it 0.25 s"
