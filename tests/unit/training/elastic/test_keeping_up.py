"""Whether a learner gets nearer to its run."""

from __future__ import annotations

import pytest

from ringfort.training.elastic.keeping_up import KeepingUp


def following(*behind: int) -> KeepingUp:
    found = KeepingUp()
    for one in behind:
        found.fetched(one)
    return found


@pytest.mark.parametrize(
    ("behind", "needs_rest"),
    [
        ((9, 9, 9, 9, 9), True),
        ((5, 6, 8, 9, 11), True),
        ((20, 9, 9, 9, 9, 9), True),  # it has come nearer, but not of late
        ((9, 8, 7, 6, 5), False),
        ((9, 9, 9, 9), False),  # too early to say
        ((1, 1, 1, 1, 1), False),  # it is as near as one can be while steps are sealed
        ((), False),
    ],
)
def test_members_rest_for_a_learner_that_does_not_come_nearer(behind: tuple[int, ...], needs_rest: bool) -> None:
    assert following(*behind).needs_rest(results=10**9, image=0) is needs_rest


def test_members_rest_while_an_image_is_fetched_that_is_smaller_than_the_results_since() -> None:
    assert following().needs_rest(results=101, image=100)
    assert not following().needs_rest(results=100, image=100)
