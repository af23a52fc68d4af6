"""How members let a learner in: what they say in their tokens, and for how long they wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.training.elastic import seating as module
from ringfort.training.elastic.protocol import Apply, Fenced, Mark, Result, Standstill, Token
from ringfort.training.elastic.run_trace import RunTrace
from ringfort.training.elastic.seating import Backoff, Seating
from ringfort.transport.locks import Event

EPOCH = Epoch(3, "a", (Member("a"), Member("b")), (), ("a#1",))
LATER = Epoch(4, "a", (Member("a"), Member("b")), (), ("a#1",))
MARK = Mark("a#1@1", 5)
LIMIT = 10.0
"""Seconds for what takes none."""


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
        self.options = SimpleNamespace(fewest=fewest, most=most, checkpoint=None)
        self.replica = SimpleNamespace(
            wants_image=False, is_preparing=False, wants_pause=False, mark=MARK, fence=lambda epoch: Standstill(MARK)
        )
        self.donor = SimpleNamespace(
            wants_image=False,
            has_learners=True,
            has_followers=True,
            has_caught_up=True,
            offers=0,
            doubts=0,
            doubt=self._doubt,
            offer=self._offer,
            rest=lambda most, is_over: 0.0 if is_over() else self.rests,
        )
        self.state = SimpleNamespace(
            image=lambda: "image",
            is_copied_between=True,
            manifest=lambda: SimpleNamespace(nbytes=1000),
            memory=SimpleNamespace(reserve=self._reserve, trim=lambda: None),
        )
        self.rests = 0.0
        self.meter = SimpleNamespace(aside=lambda seconds: self.told.append(f"aside {seconds:g}"), period=1_000_000)
        self.reserved: list[tuple[int, int]] = []
        self.has_memory = Event()
        self.has_memory.set()
        self.journal = SimpleNamespace(waits=lambda fewest: self.told.append("waits"))
        self.trace = RunTrace("test", 100)
        self.has_ended = False
        self.members = SimpleNamespace(tell=self._tell, wait_for_end=self._wait, has_ended=lambda epoch: self.has_ended)
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

    def _reserve(self, nbytes: int, images: int) -> None:
        self.reserved.append((nbytes, images))
        assert self.has_memory.wait(LIMIT)

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


def test_all_members_say_that_they_are_ready_if_one_asks_for_it(clock: Clock) -> None:
    run = Run(clock)
    seating(run).applied(applied(Token((), wants_pause=True), Token(())), EPOCH)
    assert (run.donor.offers, run.told) == (0, [True])


def test_all_members_make_an_image_as_soon_as_each_has_memory_for_it(clock: Clock) -> None:
    run, wants, has_none = Run(clock), Token((), wants_image=True), Token((), is_preparing=True)
    found = seating(run)
    run.has_memory.clear()
    found.look(EPOCH)
    assert run.replica.is_preparing  # nobody has asked this member, so it has none
    found.applied(applied(has_none, wants), EPOCH)
    found.look(EPOCH)
    assert (run.donor.offers, run.replica.is_preparing, run.reserved) == (0, True, [(1000, 1)])
    run.has_memory.set()
    found.close()
    found.look(EPOCH)
    assert not run.replica.is_preparing
    found.applied(applied(wants, has_none), EPOCH)
    assert run.donor.offers == 0  # another member has none yet
    found.applied(applied(wants, Token(())), EPOCH)
    assert (run.donor.offers, len(run.reserved)) == (1, 1)
    found.applied(applied(Token(()), Token(())), EPOCH)
    found.look(EPOCH)
    assert run.replica.is_preparing  # for the next learner it gets some again
    found.applied(applied(has_none, wants), EPOCH)
    found.close()
    assert (run.donor.offers, len(run.reserved)) == (1, 2)
    found.look(LATER)
    assert run.replica.is_preparing  # members of another epoch may not have known that one is wanted


def test_memory_for_an_image_is_got_in_the_middle_of_a_step(clock: Clock) -> None:
    run = Run(clock)
    run.meter.period = 100_000
    found = seating(run)
    run.donor.wants_image = True
    for _ in range(3):
        found.between(EPOCH)
    found.close()
    found.look(EPOCH)
    assert (run.reserved, run.replica.is_preparing, run.told, run.donor.offers) == ([(1000, 1)], False, [], 0)


@pytest.mark.parametrize("is_copied_between", [True, False])
def test_an_image_is_made_in_the_middle_of_a_long_step(clock: Clock, *, is_copied_between: bool) -> None:
    run = Run(clock)
    run.state.is_copied_between = is_copied_between
    run.has_memory.clear()
    found = seating(run)
    run.donor.wants_image = True
    found.between(EPOCH)
    assert run.donor.offers == 0  # it has no memory yet
    run.has_memory.set()
    found.close()
    found.between(EPOCH)
    found.between(EPOCH)
    assert run.donor.offers == is_copied_between


def test_a_learner_that_has_caught_up_is_let_in_in_the_middle_of_a_long_step(clock: Clock) -> None:
    run = Run(clock)
    found = seating(run)
    for _ in range(3):
        found.between(EPOCH)
    assert run.told == [True]  # once in a step
    found.end_computing()
    found.end_computing()
    assert run.told == [True, False]
    run.replica.mark = Mark("a#1@1", 6)
    found.between(EPOCH)
    assert run.told == [True, False, True]


@pytest.mark.parametrize("why", ["short", "full", "alone", "copies", "in vain"])
def test_nobody_is_let_in_in_the_middle_of_a_step(clock: Clock, why: str) -> None:
    run = Run(clock, most=2 if why == "full" else None)
    found = seating(run)
    match why:
        case "short":
            run.meter.period = 100_000
        case "alone":
            run.donor.has_learners = False
        case "copies":
            run.donor.has_followers = False
        case _:
            pass
    if why == "in vain":
        found.wait(EPOCH)
        run.told.clear()
    found.between(EPOCH)
    found.end_computing()
    assert run.told == []


def test_memory_for_checkpoints_is_there_before_the_first_one_and_while_a_machine_joins(clock: Clock) -> None:
    run = Run(clock)
    run.options.checkpoint = "run1"
    found = seating(run)
    for _ in range(3):
        found.look(EPOCH)
    found.close()
    assert run.reserved == [(1000, 1)]
    found.applied(applied(Token((), wants_image=True, is_preparing=True)), EPOCH)
    found.close()
    assert run.reserved == [(1000, 1), (1000, 2)]


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


def test_time_in_which_a_member_rests_for_a_learner_does_not_make_it_slow() -> None:
    run = Run(Clock())
    seating = Seating(cast("Any", run))
    run.rests = 0.7
    seating.applied(Apply(Result("b@1", 6, 0), (Token(()),)), EPOCH)
    assert run.told == ["aside 0.7"]
    run.is_going = True  # it leaves: nobody waits for it
    seating.applied(Apply(Result("b@1", 7, 0), (Token(()),)), EPOCH)
    run.is_going, run.has_ended = False, True  # a member is lost: the learner must wait
    seating.applied(Apply(Result("b@1", 8, 0), (Token(()),)), EPOCH)
    assert run.told == ["aside 0.7"]
