"""The virtual clock: time moves when it is told to, and it knows who sleeps."""

from __future__ import annotations

import threading

import pytest

from ringfort.errors import InvalidArgumentError, OperationTimeoutError
from ringfort.testing import VirtualClock
from tests.helpers.background import Background


def sleep(clock: VirtualClock, bell: threading.Condition, deadline: float) -> float:
    """When it woke up."""
    with bell:
        clock.wait(bell, deadline)
    return clock.now()


def test_time_moves_only_when_it_is_told_to() -> None:
    clock = VirtualClock(start=100)
    assert clock.now() == 100
    clock.advance(0.5)
    clock.advance(0)
    assert clock.now() == 100.5


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_time_never_goes_back(seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match="seconds"):
        VirtualClock().advance(seconds)


def test_a_sleeper_wakes_at_its_deadline_and_not_before() -> None:
    clock = VirtualClock()
    sleepers = [Background(sleep, clock, threading.Condition(), deadline) for deadline in (10.0, 20.0)]
    clock.wait_for_sleepers(2)
    clock.advance(9.9)
    clock.wait_for_sleepers(2)
    clock.advance(0.1)
    assert sleepers[0].result() == 10.0
    clock.wait_for_sleepers(1)
    clock.advance(100)
    assert sleepers[1].result() == 110.0


def test_a_deadline_that_has_passed_does_not_sleep() -> None:
    clock = VirtualClock(start=5)
    assert sleep(clock, threading.Condition(), 5.0) == 5.0


def test_a_bell_wakes_its_sleeper_without_time() -> None:
    clock, bell = VirtualClock(), threading.Condition()
    sleeper = Background(sleep, clock, bell, 10.0)
    clock.wait_for_sleepers(1)
    with bell:
        bell.notify_all()
    assert sleeper.result() == 0.0


def test_one_whose_bell_has_rung_is_not_counted_as_asleep_though_it_has_not_run_yet() -> None:
    clock, bell = VirtualClock(), threading.Condition()
    sleeper = Background(sleep, clock, bell, 10.0)
    clock.wait_for_sleepers(1)
    with bell:  # as long as this is held the sleeper cannot run
        assert "1 asleep" in repr(clock)
        bell.notify_all()
        assert "0 asleep" in repr(clock)
    sleeper.result()


def test_waiting_for_sleepers_who_do_not_come_gives_up() -> None:
    clock = VirtualClock()
    with pytest.raises(OperationTimeoutError, match="2 sleepers"):
        clock.wait_for_sleepers(2, timeout=0.01)
