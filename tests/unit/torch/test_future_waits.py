"""How long a program waits for futures, as far as that can be told."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

from ringfort.telemetry.step_time import serve
from ringfort.torch.future_waits import FutureWaits


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waits(clock: Clock) -> FutureWaits:
    return FutureWaits(clock)


def test_the_wait_begins_with_the_last_collective_and_ends_with_all(waits: FutureWaits, clock: Clock) -> None:
    first = waits.issued()
    clock.now = 11.0
    first()  # while gradients were computed
    second = waits.issued()
    clock.now = 12.0
    third = waits.issued()
    clock.now = 12.5
    third()
    clock.now = 13.0
    second()
    clock.now = 20.0
    assert waits.exchanged().seconds == 1.0
    assert waits.exchanged().seconds == 0.0


def test_nobody_has_waited_for_what_is_under_way_when_the_step_ends(waits: FutureWaits, clock: Clock) -> None:
    late = waits.issued()
    clock.now = 11.0
    assert waits.exchanged().seconds == 0.0
    done = waits.issued()
    late()  # of the step before
    clock.now = 11.5
    done()
    assert waits.exchanged().seconds == 0.5


def test_a_callback_that_issues_another_makes_the_wait_longer(waits: FutureWaits, clock: Clock) -> None:
    def callback() -> None:
        serve()
        clock.now = 12.0
        waits.issued()()

    end = waits.issued()
    clock.now = 11.0
    end()
    thread = threading.Thread(target=callback)
    thread.start()
    thread.join()
    assert waits.exchanged().seconds == 2.0


def test_a_gpu_that_still_computes_is_not_waited_for_by_others(waits: FutureWaits, clock: Clock) -> None:
    waits.ready()  # of a call without a future
    end = waits.issued()
    clock.now = 14.0
    waits.ready()
    clock.now = 15.0
    end()
    assert waits.exchanged().seconds == 1.0
