"""Why a program has left, as the others hear it."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import ringfort
from ringfort.training.elastic import handle as handle_module
from ringfort.training.elastic.protocol import Result
from ringfort.training.elastic.step import Done
from ringfort.transport.locks import Event

LIMIT = 10.0
"""Seconds for what takes a fifth of one."""


class Participant:
    """A run without a cluster, in which this program has nothing to compute."""

    is_finished = False
    is_leaving = False
    is_busy = True

    def __init__(self, *_: Any) -> None:
        self.reasons: list[str] = []
        self.has_left = Event()
        self.steps = 3
        self.error: Exception | None = None

    def open(self) -> None: ...

    def advance(self) -> Done | None:
        if self.error is not None:
            raise self.error
        if self.is_leaving:
            return None
        self.steps -= 1
        return Done(Result("b@1", 3 - self.steps, 0), 1.0, 0.0) if self.steps >= 0 else None

    def close(self, why: str) -> None:
        self.reasons.append(why)
        self.has_left.set()


@pytest.fixture(autouse=True)
def participant(monkeypatch: pytest.MonkeyPatch) -> Participant:
    made = Participant()
    monkeypatch.setattr(handle_module, "Participant", lambda *_: made)
    return made


def steps(run: Any) -> Any:
    return run.steps(3, samples=4, batch=2, microbatch=1)


def test_a_program_that_leaves_before_its_loop_has_no_steps(participant: Participant) -> None:
    with ringfort.elastic({"w": np.zeros(2)}, name="early") as run:
        run.leave()
        assert list(steps(run)) == []
    assert participant.reasons[0] == "it leaves"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError, "its program has failed with RuntimeError"),
        (KeyboardInterrupt, "its program was interrupted"),
        (SystemExit, "its program has stopped"),
    ],
)
def test_an_error_in_the_loop_is_named(participant: Participant, error: type[BaseException], why: str) -> None:
    def train(run: Any) -> None:
        for _ in steps(run):
            raise error

    with pytest.raises(error), ringfort.elastic({"w": np.zeros(2)}) as run:  # noqa: PT012
        for _ in steps(run):
            raise error
    assert set(participant.reasons) == {why}
    with pytest.raises(error), ringfort.elastic({"w": np.zeros(2)}) as run:
        train(run)
    assert set(participant.reasons) == {why}


def test_an_error_of_the_run_is_named(participant: Participant) -> None:
    participant.error = ringfort.InvalidArgumentError("name", "x", "is another run")
    with pytest.raises(ringfort.InvalidArgumentError), ringfort.elastic({"w": np.zeros(2)}) as run:
        for _ in steps(run):
            pass
    assert participant.reasons[0] == "its program has failed with InvalidArgumentError"


def test_after_a_break_the_program_leaves_although_it_goes_on(participant: Participant) -> None:
    with ringfort.elastic({"w": np.zeros(2)}) as run:
        for _ in steps(run):
            break
        assert participant.has_left.wait(LIMIT)
    assert set(participant.reasons) == {"its program has stopped"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_not_lost_if_the_program_breaks_out_of_the_loop_in_that_step(
    participant: Participant, number: int
) -> None:
    """A supervisor that asks a program to end would wait for it in vain, and kill it."""
    before = signal.getsignal(number)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught, ringfort.elastic({"w": np.zeros(2)}) as run:  # noqa: PT012
        for _ in steps(run):
            os.kill(os.getpid(), number)
            break
        assert not participant.has_left.is_set()
    assert getattr(caught.value, "code", number) in (143, signal.SIGINT)
    assert participant.reasons
    assert signal.getsignal(number) == before


def test_a_signal_that_the_program_has_caught_is_not_raised_again(participant: Participant) -> None:
    with ringfort.elastic({"w": np.zeros(2)}) as run:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            for _ in steps(run):
                os.kill(os.getpid(), signal.SIGINT)
        assert participant.has_left.is_set()


def test_after_a_break_the_run_is_left_before_another_begins(
    participant: Participant, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Participant()

    def begin(*_: Any) -> Participant:
        assert participant.has_left.is_set()
        return second

    with ringfort.elastic({"w": np.zeros(2)}) as run:
        for _ in steps(run):
            break
        monkeypatch.setattr(handle_module, "Participant", begin)
        with ringfort.elastic({"w": np.zeros(2)}) as other:
            assert len(list(steps(other))) == 3


def test_a_child_that_was_forked_while_its_parent_leaves_does_not_wait_for_that(
    participant: Participant, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = Event(), Event()

    def close(why: str) -> None:
        begun.set()
        assert may_end.wait(LIMIT)

    monkeypatch.setattr(participant, "close", close)
    with ringfort.elastic({"w": np.zeros(2)}) as run:
        for _ in steps(run):
            break
        assert begun.wait(LIMIT)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(LIMIT))
            run.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        may_end.set()


def test_a_break_when_no_thread_can_start_any_more_leaves_at_once(
    participant: Participant, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ringfort.elastic({"w": np.zeros(2)}) as run:
        with monkeypatch.context() as patch:
            patch.setattr("sys.is_finalizing", lambda: True)
            for _ in steps(run):
                break
        assert participant.reasons == ["its program has stopped"]


def test_a_run_that_is_no_context_is_left_at_once(participant: Participant) -> None:
    run = ringfort.elastic({"w": np.zeros(2)})
    for _ in steps(run):
        break
    assert participant.reasons == ["its program has stopped"]


def test_a_program_that_was_asked_to_leave_says_so(participant: Participant) -> None:
    with ringfort.elastic({"w": np.zeros(2)}) as run:
        assert [step.number for step in steps(run)] == [1, 2, 3]
    assert participant.reasons[0] == "it leaves"
