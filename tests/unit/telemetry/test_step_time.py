"""Where the time of a step goes, on a clock that the test moves."""

from __future__ import annotations

import threading

import pytest

from ringfort.telemetry import step_time
from ringfort.telemetry.step_time import Blocked, Exchanged, Phase, StepTime, is_service_thread, serve


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(step_time, "perf_counter", found)
    return found


@pytest.fixture
def time(clock: Clock) -> StepTime:
    return StepTime(clock)


class Source:
    """A group, say, that the test lets exchange something."""

    def __init__(self) -> None:
        self.found: Exchanged | None = Exchanged()

    def __call__(self) -> Exchanged | None:
        found = self.found
        self.found = None if found is None else Exchanged()
        return found


def test_a_step_has_what_was_added_and_what_sources_found(time: StepTime, clock: Clock) -> None:
    source = Source()
    time.add_source(source)
    source.found = Exchanged(0.25, 400)
    time.add(Phase.EXCHANGE, 0.5)
    time.add(Phase.DATA, 0.125)
    clock.pass_(2.0)
    assert time.take() == (2.0, 0.125, 0.75, 0.0, 0.0, 400)
    clock.pass_(1.0)
    assert time.take() == (1.0, 0.0, 0.0, 0.0, 0.0, 0)


def test_a_source_whose_owner_is_gone_is_dropped_also_where_no_step_is_ever_made(time: StepTime) -> None:
    class Counted(Source):
        asked = 0

        def __call__(self) -> Exchanged | None:
            Counted.asked += 1
            return None

    for _ in range(1000):
        time.add_source(Counted())
    assert len(time._sources) < 64
    time.take()
    asked = Counted.asked
    time.take()
    assert Counted.asked == asked


@pytest.mark.parametrize(
    ("waited", "codec", "operations", "share"),
    [
        (1.0, 0.25, 1.0, 0.25),  # the program waits for all of the collective
        (0.5, 0.25, 1.0, 0.125),  # for half of it
        (0.0, 0.25, 1.0, 0.0),  # in the background
        (1.0, 0.125, 0.25, 0.125),  # it waits for others too
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_codecs_have_their_share_of_the_wait(
    time: StepTime, clock: Clock, waited: float, codec: float, operations: float, share: float
) -> None:
    time.add(Phase.EXCHANGE, waited)
    time.compressed(codec, operations)
    clock.pass_(4.0)
    spent = time.take()
    assert (spent.exchange, spent.codec) == (waited - share, share)


def test_a_collective_that_belongs_to_another_phase_is_no_exchange(time: StepTime, clock: Clock) -> None:
    source = Source()
    time.add_source(source)
    clock.pass_(2.0)
    source.found = Exchanged(0.5 + 0.375, 100 + 8)  # with a small all-reduce, of tokens
    time.reassign(Phase.SEAL, 0.75, exchanged=0.375, reduced=8)
    spent = time.take()
    assert (spent.exchange, spent.seal, spent.reduced) == (0.5, 0.75, 100)


def test_what_no_source_has_counted_takes_nothing_from_others(time: StepTime, clock: Clock) -> None:
    clock.pass_(2.0)
    time.reassign(Phase.SEAL, 0.75, exchanged=0.5, reduced=8)
    time.add(Phase.DATA, 0.25)
    spent = time.take()
    assert (spent.data, spent.exchange, spent.seal, spent.reduced) == (0.25, 0.0, 0.75, 0)


def test_a_pause_belongs_to_no_step(time: StepTime, clock: Clock) -> None:
    clock.pass_(1.0)
    time.add(Phase.DATA, 0.5)
    with time.paused():
        clock.pass_(10.0)
        time.add(Phase.DATA, 8.0)
    clock.pass_(1.0)
    assert time.take()[:3] == (2.0, 0.5, 0.0)
    clock.pass_(5.0)
    time.restart()
    clock.pass_(1.0)
    assert time.take().seconds == 1.0


def test_a_thread_is_counted_once_however_deep_it_waits(time: StepTime, clock: Clock) -> None:
    with Blocked(time, Phase.EXCHANGE):
        clock.pass_(0.25)
        with Blocked(time, Phase.EXCHANGE):  # a callback
            clock.pass_(0.5)
    with Blocked(time, Phase.DATA), Blocked(time, Phase.DATA):  # a loader around a loader
        clock.pass_(1.0)
    spent = time.take()
    assert (spent.exchange, spent.data) == (0.75, 1.0)


def test_nobody_waits_for_a_thread_in_the_background(time: StepTime, clock: Clock) -> None:
    found: list[bool] = []

    def work() -> None:
        serve()
        found.append(is_service_thread())
        with Blocked(time, Phase.EXCHANGE):
            clock.pass_(1.0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (found, is_service_thread(), time.take().exchange) == ([True], False, 0.0)


def test_what_is_taken_out_again_never_makes_a_phase_negative(time: StepTime, clock: Clock) -> None:
    time.add(Phase.EXCHANGE, -1.0)
    clock.pass_(1.0)
    assert time.take().exchange == 0.0
