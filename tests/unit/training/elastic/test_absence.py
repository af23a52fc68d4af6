"""A member that is away for a while."""

from __future__ import annotations

import pytest

from ringfort.training.elastic import absence
from ringfort.training.elastic.absence import ASLEEP, SLOW, Absence


def never() -> bool:
    return False


def test_a_slow_member_is_away_until_it_has_left() -> None:
    away = Absence()
    assert not away.why
    away.begin(SLOW)
    assert away.why == SLOW
    away.left()
    away.wait_for_end(never)
    assert not away.why


def test_a_machine_that_sleeps_waits_for_a_member_that_leaves_by_itself() -> None:
    away, forced = Absence(), list[str]()
    away.begin(SLOW)
    away.left()
    away.fall_asleep(lambda: forced.append("left"))
    assert (away.why, forced) == (ASLEEP, [])


def test_a_member_that_does_not_leave_in_time_is_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absence, "_FINISH", 0.0)
    away, forced = Absence(), list[str]()
    away.fall_asleep(lambda: forced.append("left"))
    assert (away.why, forced) == (ASLEEP, ["left"])


def test_a_program_that_ends_does_not_wait_for_its_machine_to_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absence, "_FINISH", 0.0)
    away, looks = Absence(), list[int]()

    def is_closing() -> bool:
        looks.append(1)
        return True

    away.fall_asleep(lambda: None)
    away.wait_for_end(is_closing)
    assert (away.why, looks) == ("", [1])


def test_a_machine_that_is_awake_ends_the_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absence, "_FINISH", 0.0)
    away = Absence()
    away.fall_asleep(lambda: None)
    away.wake_up()
    away.wait_for_end(never)
    assert not away.why
