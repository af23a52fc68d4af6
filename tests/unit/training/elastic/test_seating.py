"""How members let a learner in: what they say in their tokens, and for how long they wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.training.elastic import seating as module
from ringfort.training.elastic.protocol import Apply, Fenced, Mark, Result, Standstill, Token
from ringfort.training.elastic.seating import Backoff, Seating

EPOCH = Epoch(3, "a", (Member("a"), Member("b")), (), ("a#1",))
MARK = Mark("a#1@1", 5)


def test_the_time_between_two_waits_in_vain_doubles_up_to_a_limit() -> None:
    backoff, now, pauses = Backoff(), 0.0, list[float]()
    assert backoff.is_over(now)
    for _ in range(8):
        backoff.failed(now)
        end = next(now + tenth / 10 for tenth in range(1, 200) if backoff.is_over(now + tenth / 10 + 1e-9))
        pauses.append(round(end - now, 3))
        now = end
    assert pauses == [0.5, 1, 2, 4, 8, 10, 10, 10]
    backoff.succeeded()
    backoff.failed(now)
    assert backoff.is_over(now + 0.5)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Run:
    """A participant whose learner may have caught up, is seated at a time, or goes."""

    def __init__(self, clock: Clock, *, fewest: int = 1, most: int | None = None) -> None:
        self.clock = clock
        self.options = SimpleNamespace(fewest=fewest, most=most)
        self.replica = SimpleNamespace(
            wants_image=False, wants_pause=False, mark=MARK, fence=lambda epoch: Standstill(MARK)
        )
        self.donor = SimpleNamespace(
            wants_image=False, has_caught_up=True, offers=0, doubts=0, doubt=self._doubt, offer=self._offer
        )
        self.state = SimpleNamespace(image=lambda: "image")
        self.journal = SimpleNamespace(waits=lambda fewest: self.told.append("waits"))
        self.members = SimpleNamespace(tell=self._tell, wait_for_end=self._wait)
        self.is_busy, self.is_going = True, False
        self.told: list[Any] = []
        self.seated_at = float("inf")
        self.gone_at = float("inf")

    def _tell(self, stands: Standstill, *, is_ready: bool) -> None:
        self.told.append(is_ready)

    def _wait(self, epoch: Epoch, seconds: float) -> bool:
        self.clock.now = min(self.clock.now + seconds, max(self.clock.now, self.seated_at))
        self.donor.has_caught_up = self.clock.now < self.gone_at
        return self.clock.now >= self.seated_at

    def _doubt(self) -> None:
        self.donor.doubts += 1

    def _offer(self, *_: object) -> None:
        self.donor.offers += 1
        self.donor.wants_image = False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def seating(run: Run) -> Seating:
    return Seating(cast("Any", run))


def applied(*tokens: Token) -> Apply:
    return Apply(Result(MARK.branch, 5, 1), tokens, MARK)


def test_a_token_says_what_the_learners_need_at_the_moment(clock: Clock) -> None:
    run = Run(clock, most=2)
    run.donor.wants_image = True
    found = seating(run)
    found.look(EPOCH)
    assert (run.replica.wants_image, run.replica.wants_pause) == (True, False)  # there is no room
    run.options.most = 3
    found.look(EPOCH)
    assert run.replica.wants_pause
    run.donor.has_caught_up = False
    found.look(EPOCH)
    assert not run.replica.wants_pause


def test_all_members_make_an_image_and_say_that_they_are_ready_if_one_asks_for_it(clock: Clock) -> None:
    run = Run(clock)
    seating(run).applied(applied(Token(()), Token((), wants_image=True)), EPOCH)
    assert (run.donor.offers, run.told) == (1, [])
    seating(run).applied(applied(Token((), wants_pause=True), Token(())), EPOCH)
    assert (run.donor.offers, run.told) == (1, [True])


def test_the_wait_ends_when_the_learner_is_seated(clock: Clock) -> None:
    run = Run(clock)
    run.seated_at = clock.now + 0.3
    with pytest.raises(Fenced):
        seating(run).wait(EPOCH)
    assert clock.now == pytest.approx(100.3)
    assert (run.told, run.donor.doubts) == ([True], 0)


def test_a_learner_that_is_not_seated_is_waited_for_once_and_must_ask_again(clock: Clock) -> None:
    run = Run(clock)
    found = seating(run)
    found.wait(EPOCH)
    assert clock.now == pytest.approx(102.0)
    assert (run.told, run.donor.doubts, run.is_busy) == ([True, False], 1, True)
    found.look(EPOCH)
    assert not run.replica.wants_pause
    clock.now += 0.5
    found.look(EPOCH)
    assert run.replica.wants_pause


def test_a_learner_that_goes_is_not_waited_for(clock: Clock) -> None:
    run = Run(clock)
    run.replica.wants_pause = True
    run.gone_at = clock.now + 0.2
    seating(run).wait(EPOCH)
    assert 100.2 <= clock.now < 100.3


def test_a_member_that_has_no_stream_to_the_learner_waits_as_the_others_do(clock: Clock) -> None:
    run = Run(clock)
    run.gone_at = 0.0
    run.seated_at = clock.now + 0.4
    with pytest.raises(Fenced):
        seating(run).wait(EPOCH)


def test_below_the_minimum_they_wait_as_long_as_it_takes_and_make_images(clock: Clock) -> None:
    run = Run(clock, fewest=3)
    run.donor.wants_image = True
    seating(run).wait(EPOCH)
    assert run.told == ["waits", True]  # and still ready
    assert (run.donor.offers, run.donor.doubts) == (1, 0)


def test_a_member_that_leaves_does_not_wait(clock: Clock) -> None:
    run = Run(clock)
    run.is_going = True
    seating(run).wait(EPOCH)
    assert clock.now == 100.0
