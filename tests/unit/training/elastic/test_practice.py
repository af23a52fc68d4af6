"""What a learner computes before it is seated."""

from __future__ import annotations

from ringfort.training.elastic.practice import EVERY, IN_A_ROW, STANDSTILL, STEPS, Practice


def test_a_newcomer_warms_up_and_is_measured_once() -> None:
    practice = Practice(was_slow=False, is_measured=False)
    tries = 0
    while practice.is_due(0.0, 7):
        assert not practice.is_fit
        practice.done(0.0, 7, 100.0)
        tries += 1
    assert (tries, practice.is_fit) == (2, True)


def test_a_member_that_was_away_does_not_practise() -> None:
    practice = Practice(was_slow=False, is_measured=True)
    assert practice.is_fit
    assert not practice.is_due(0.0, 7)


class Following:
    """A learner that was slow, and members that seal a step each `interval` seconds."""

    def __init__(self, interval: float) -> None:
        self.practice = Practice(was_slow=True, is_measured=True)
        self.interval = interval
        self.now = 1000.0
        self.tries: list[float] = []

    def follow(self, seconds: float, needs: float) -> bool:
        """Follow for so long. Return whether it is fit."""
        end = self.now + seconds
        while self.now < end and not self.practice.is_fit:
            if self.practice.is_due(self.now, self.step):
                self.tries.append(self.now)
                self.now += needs
                self.practice.done(self.now, self.step, needs)
            self.now += 0.25
        return self.practice.is_fit

    @property
    def step(self) -> int:
        return int(self.now / self.interval)


def test_one_that_was_slow_is_fit_when_it_needs_no_longer_than_a_step_twice_in_a_row() -> None:
    learner = Following(interval=1.0)
    assert not learner.follow(300.0, needs=3.0)
    assert learner.follow(300.0, needs=0.5)
    gaps = [later - earlier for earlier, later in zip(learner.tries, learner.tries[1:], strict=False)]
    assert min(gaps) >= EVERY
    assert IN_A_ROW == 2


def test_it_waits_for_some_steps_of_the_members() -> None:
    learner = Following(interval=10.0)
    assert not learner.follow(STEPS * 10.0 - 1.0, needs=1.0)
    assert len(learner.tries) == 1
    assert learner.follow(3 * STEPS * 10.0, needs=1.0)


def test_if_the_members_stand_still_they_do_not_wait_for_it() -> None:
    learner = Following(interval=1e9)
    assert not learner.follow(STANDSTILL, needs=30.0)
    assert learner.follow(3 * STANDSTILL, needs=30.0)
