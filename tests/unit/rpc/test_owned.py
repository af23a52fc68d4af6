"""The values that a rank keeps: what those get that ask for one, and how many are kept."""

from __future__ import annotations

import threading

import pytest

from ringfort.rpc.owned import OwnedValues
from ringfort.rpc.protocol import Count, Reference
from ringfort.rpc.requests import Failure
from tests.helpers.agents import PATIENCE

RANKS = 3


def owner_of_rank_0(most: int = 1 << 16) -> OwnedValues:
    return OwnedValues(0, world_size=RANKS, most=most)


# --- values -----------------------------------------------------------------------------------------------------------


def test_who_asks_for_what_a_lost_rank_was_about_to_ask_for_is_not_kept_waiting() -> None:
    owner = owner_of_rank_0()
    before, after = Reference(0, 1, 5), Reference(0, 1, 6)
    outcome = owner.outcome(before, 2)
    assert not outcome.done()
    owner.lost(1)
    for asked in (outcome, owner.outcome(after, 2)):
        assert isinstance(asked.result(0), Failure)
    assert len(owner) == 0


@pytest.mark.parametrize("is_counted_first", [True, False])
def test_it_is_the_same_for_who_holds_what_a_lost_rank_was_about_to_ask_for(is_counted_first: bool) -> None:
    owner, name = owner_of_rank_0(), Reference(0, 1, 5)
    for is_now in (True, False):
        if is_now is is_counted_first:
            owner.count(Count(name, 2, 2, 1), 2)
        else:
            owner.lost(1)
    failure = owner.outcome(name, 2).result(0)
    assert isinstance(failure, Failure)
    assert failure.message == "rank 1, which asked for this value, is lost"
    owner.count(Count(name, 2, 2, -1), 2)
    assert len(owner) == 0


def test_what_is_being_made_when_the_rank_that_asked_for_it_is_lost_is_there_for_others() -> None:
    owner, name = owner_of_rank_0(), Reference(0, 1, 5)
    owner.count(Count(name, 1, 1, 1), 1)
    owner.count(Count(name, 2, 1, 1), 1)
    owner.lost(1, {name})
    outcome = owner.outcome(name, 2)
    assert not outcome.done()
    owner.fulfil(name, "value")
    assert outcome.result(0) == "value"


def test_who_gives_up_asking_leaves_nothing_behind_and_takes_nothing_from_those_who_hold() -> None:
    owner, unknown, name = owner_of_rank_0(), Reference(0, 1, 99), Reference(0, 1, 1)
    owner.outcome(unknown, 2)
    owner.forget(unknown)
    assert len(owner) == 0
    owner.count(Count(name, 1, 1, 1), 1)
    owner.outcome(name, 2)
    owner.forget(name)
    assert len(owner) == 1


def test_another_thread_can_count_while_those_that_waited_for_a_freed_value_are_told() -> None:
    owner, name = owner_of_rank_0(), Reference(0, 1, 1)
    owner.count(Count(name, 1, 1, 1), 1)
    has_counted: list[bool] = []

    def count_elsewhere(_: object) -> None:
        thread = threading.Thread(target=owner.count, args=(Count(Reference(0, 2, 1), 2, 2, 1), 2))
        thread.start()
        thread.join(PATIENCE)
        has_counted.append(not thread.is_alive())

    owner.outcome(name, 2).add_done_callback(count_elsewhere)
    owner.count(Count(name, 1, 1, -1), 1)
    assert has_counted == [True]


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_rank_that_has_more_values_kept_than_it_may_is_full_until_it_lets_go_of_one() -> None:
    owner = owner_of_rank_0(2)
    names = [Reference(0, 1, number) for number in range(3)]
    for name in names:
        assert owner.count(Count(name, 1, 1, 1), 1) == ""
    assert owner.is_full_for(1)
    assert not owner.is_full_for(2)
    owner.count(Count(names[0], 2, 1, 1), 1)  # it passes one on, and that one is still of its asking
    owner.count(Count(names[0], 1, 1, -1), 1)
    assert owner.is_full_for(1)
    owner.count(Count(names[0], 2, 1, -1), 2)
    assert not owner.is_full_for(1)
    assert len(owner) == 2


def test_what_a_lost_rank_had_kept_is_of_its_asking_until_it_is_freed() -> None:
    owner, name = owner_of_rank_0(1), Reference(0, 1, 1)
    for number in (1, 2):
        owner.count(Count(Reference(0, 1, number), 1, 1, 1), 1)
    owner.count(Count(name, 2, 1, 1), 1)
    owner.lost(1)
    assert owner.is_full_for(1)
    owner.count(Count(name, 2, 2, 1), 2)
    owner.part(2, 1)
    assert not owner.is_full_for(1)
    assert len(owner) == 1
    owner.count(Count(name, 2, 2, -1), 2)
    assert not any(owner._told.values())


def test_a_rank_that_goes_on_beyond_all_bounds_is_told_from_one_that_hears_of_it_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = owner_of_rank_0(2)
    monkeypatch.setattr("ringfort.rpc.owned.SLACK", 3)
    wrong = [owner.count(Count(Reference(0, 1, number), 1, 1, 1), 1) for number in range(100)]
    assert wrong == [""] * 5 + ["it keeps asking for values to be kept: max_references here is 2"] * 95
    assert len(owner) == 5
    assert owner.count(Count(Reference(0, 2, 1), 2, 2, 1), 2) == ""  # another rank's are its own
    assert owner.count(Count(Reference(0, 1, 0), 2, 1, 1), 1) == ""  # and so are those that it has


def test_a_rank_keeps_its_own_values_without_a_bound() -> None:
    owner = owner_of_rank_0(1)
    for number in range(5):
        owner.count(Count(Reference(0, 0, number), 0, 0, 1), 0)
    assert not owner.is_full_for(0)
    assert len(owner) == 5
