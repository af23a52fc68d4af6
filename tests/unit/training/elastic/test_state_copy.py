"""A program without a place in its run: what it copies, what it only replays, and when it does neither."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.core.state_sources import StateSource
from ringfort.errors import StateTransferError
from ringfort.training.elastic import state_copy as module
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.learner import Fetched, Replayed
from ringfort.training.elastic.protocol import Held, Mark, Replica, Result
from ringfort.training.elastic.run_trace import RunTrace
from ringfort.training.elastic.state_copy import StateCopy
from ringfort.training.elastic.state_tree import StateTree
from ringfort.training.elastic.step import Done, Turn

EPOCH = Epoch(4, "a", tuple(map(Member, "ab")), (), ("a#1",))
LATER = Epoch(5, "a", tuple(map(Member, "abz")), (), ("a#1",))
HERE = Mark("a#1@1", 7, b"chain", 700)


def results(count: int, mark: Mark = HERE, size: int = 2) -> list[Replayed]:
    found = list[Replayed]()
    for behind in reversed(range(count)):
        result = Result(mark.branch, mark.step + 1, mark.cursor + 10, {"float32": np.ones(size, np.float32)})
        found.append(Replayed(mark, mark.after(result, 1), result, 1, (), True, behind))
        mark = found[-1].after
    return found


class Learner:
    """Has an image, and results that follow marks."""

    image: Fetched | None = None
    results: tuple[Replayed, ...] = ()
    ends: Mark = HERE
    """What a member is at that has no more results."""
    fetches = 0

    def __init__(self, donors: object, *, limit: int) -> None:
        self.donors = ("a",)

    def next_result(self, after: Mark, *, timeout: float, wants_seat: bool = True) -> Replayed | None:
        for one in type(self).results:
            if one.before == after:
                return one
        if after == type(self).ends:
            return None
        raise StateTransferError("not in its history", {})

    def fetching(self, check: Any, *, known: Any, timeout: float) -> Generator[Fetched, None, Fetched]:
        type(self).fetches += 1
        image = type(self).image
        assert image is not None
        check(image)
        yield image
        return image

    def close(self) -> None:
        pass


class Search:
    """Finds a donor."""

    def __init__(self, *_: object) -> None:
        pass

    def start(self, sources: object) -> None:
        pass

    def close(self) -> None:
        pass

    def has_found(self, seconds: float) -> bool:
        return True


class Run:
    """A participant in no epoch. It is seated when it has said so often that it is ready."""

    def __init__(self, mark: Mark = HERE) -> None:
        self.values = {"w": np.zeros(1000)}
        self.state = StateTree(self.values)
        self.replica = Replica(Data(100, 10, 5, 0), cast("Any", None), cast("Any", None), cast("Any", None), mark=mark)
        self.local = SimpleNamespace(layout="layout", fits=lambda layout: True, prepare=lambda layout: None)
        self.told: list[tuple[int, int, bool]] = []
        self.epoch: Epoch | None = None
        self.found: tuple[StateSource, ...] = (StateSource("a", EPOCH),)
        self.waited = 0
        self.members = SimpleNamespace(
            news=0,
            sources=lambda: self.found,
            open_stream=None,
            learned=self._learned,
            wait_for_news=self._wait,
            seated=1,
            node=SimpleNamespace(peer_id="me"),
        )
        self.donor = SimpleNamespace(sealed=lambda *_, **__: None, begin=lambda mark: None, wants_image=False)
        self.origin = SimpleNamespace(has_copy=lambda: None)
        self.meter = SimpleNamespace(speed=1, end_step=lambda **_: None)
        self.options = SimpleNamespace(fewest=1)
        self.divergence = SimpleNamespace(origin=0)
        self.data, self.last_epoch = Data(100, 10, 5, 0), None
        self.journal = SimpleNamespace(say=lambda *_: None)
        self.trace = RunTrace("test", 100)
        self.others = SimpleNamespace(announce=lambda now: None)
        self.ends_with: Callable[[Mark], bool] = lambda mark: mark.step >= 100
        self.is_finished = self.is_going = self.raises_nonfinite = self.was_slow = False

    def _learned(self, epoch: Epoch, stands: Any, *, is_ready: bool) -> None:
        assert not stands.is_pending
        self.told.append((epoch.number, stands.mark.step, is_ready))
        if is_ready:
            self.members.epoch = LATER

    def _wait(self, seen: int, seconds: float) -> None:
        self.waited += 1

    def done(self, result: Result, before: Mark, *, is_finite: bool) -> Done:
        return Done(result, 1.0, 0.0, is_finite, samples=result.cursor - before.cursor)

    def follow(self) -> list[int]:
        """Return the steps that it applies."""
        self.members.epoch = self.epoch
        return [done.result.step for done in StateCopy(cast("Any", self), 30.0).follow(None)]


@pytest.fixture(autouse=True)
def learner(monkeypatch: pytest.MonkeyPatch) -> type[Learner]:
    class Fresh(Learner):
        pass

    monkeypatch.setattr(module, "Learner", Fresh)
    monkeypatch.setattr(module, "DonorSearch", Search)
    return Fresh


def image_at(mark: Mark) -> Fetched:
    return Fetched(StateTree({"w": np.full(1000, mark.step, float)}).image(), mark, EPOCH, None)


def test_who_has_no_source_waits_for_news_and_copies_nothing() -> None:
    run = Run()
    run.found = ()
    assert run.follow() == []
    assert (run.waited, run.told) == (1, [])


def test_who_is_seated_meanwhile_keeps_its_state() -> None:
    run = Run()
    run.epoch = LATER
    assert run.follow() == []
    assert run.told == []


def test_a_process_that_was_away_replays_what_it_missed_and_fetches_no_image(learner: type[Learner]) -> None:
    missed = results(3)
    learner.results, learner.ends = tuple(missed), missed[-1].after
    run = Run()
    run.replica.held = Held(3, Result(HERE.branch, 8, 710))  # of the epoch that went on without it
    assert run.follow() == [8, 9, 10]
    assert learner.fetches == 0
    assert run.told == [(4, 7, False), (4, 8, False), (4, 9, False), (4, 10, False), (4, 10, True)]
    assert run.replica.mark == missed[-1].after


def test_a_process_that_missed_nothing_gives_up_what_it_held_and_is_ready(learner: type[Learner]) -> None:
    """Otherwise it could never be seated: a step of an epoch that has ended would be pending."""
    run = Run()
    run.replica.held = Held(3, Result(HERE.branch, 8, 710))
    assert run.follow() == []
    assert run.replica.held is None
    assert run.told == [(4, 7, False), (4, 7, True)]
    assert learner.fetches == 0


def test_a_process_that_missed_more_than_the_members_keep_copies_the_state(learner: type[Learner]) -> None:
    later = Mark(HERE.branch, 20, b"later", 830)
    learner.image, learner.ends = image_at(later), later
    run = Run()
    assert run.follow() == []
    assert (run.replica.mark, run.values["w"][0]) == (later, 20)
    assert run.told == [(4, 20, False), (4, 20, True)]


def test_results_that_are_larger_than_the_state_are_not_replayed(learner: type[Learner]) -> None:
    missed = results(5, size=500)  # 2000 bytes each, and the state has 8000
    learner.results, learner.ends = tuple(missed), missed[-1].after
    learner.image = image_at(missed[-1].after)
    run = Run()
    assert run.follow() == []
    assert learner.fetches == 1
    learner.results, learner.fetches = tuple(missed[1:]), 0
    assert Run(missed[0].after).follow() == [9, 10, 11, 12]
    assert learner.fetches == 0


def test_a_new_process_and_one_that_never_computed_copy_the_state(learner: type[Learner]) -> None:
    learner.image, learner.ends = image_at(HERE), HERE
    run = Run(Mark())
    run.local.layout = None
    run.follow()
    assert (learner.fetches, run.replica.mark) == (1, HERE)
    run = Run()
    run.local.layout = None
    run.follow()
    assert learner.fetches == 2


def test_a_new_process_warms_up_while_the_state_comes_and_adds_to_no_sum(learner: type[Learner]) -> None:
    learner.image, learner.ends = replace(image_at(HERE), layout=cast("Any", "layout")), HERE
    run = Run(Mark())
    run.meter = SimpleNamespace(speed=0, overhead=0, end_step=lambda **_: None, forget=lambda: None)
    run.members.epoch = None
    weights = list[float]()
    for turn in StateCopy(cast("Any", run), 30.0).follow(None):
        assert isinstance(turn, Turn)
        weights.append(run.values["w"][0])
        run.replica.add(turn.compute.part, turn.mark)
        assert not run.replica.covered
        run.meter.speed = 5
    assert weights == [0, 0]  # the state was not loaded yet
    assert (run.replica.mark, run.values["w"][0], run.replica.speed) == (HERE, 7, 5)
    assert run.told == [(4, 7, False), (4, 7, True)]


def test_a_process_with_a_local_sum_does_not_warm_up_before_it_gives_the_sum_up(learner: type[Learner]) -> None:
    later = Mark(HERE.branch, 20, b"later", 830)
    learner.image, learner.ends = replace(image_at(later), layout=cast("Any", "layout")), later
    run = Run()
    run.meter = SimpleNamespace(speed=0, overhead=0, end_step=lambda **_: None, forget=lambda: None)
    run.replica.add(0)
    run.members.epoch = None
    for turn in StateCopy(cast("Any", run), 30.0).follow(None):
        assert run.replica.mark == later
        assert isinstance(turn, Turn)
        run.replica.add(turn.compute.part, turn.mark)
        run.meter.speed = 5
    assert run.replica.speed == 5


def test_nobody_warms_up_for_a_run_that_has_finished(learner: type[Learner]) -> None:
    learner.image, learner.ends = replace(image_at(HERE), layout=cast("Any", "layout")), HERE
    run = Run(Mark())
    run.meter = SimpleNamespace(speed=0, end_step=lambda **_: None)
    run.ends_with = lambda mark: mark.step >= HERE.step
    run.members.seated, run.options.fewest = 1, 2
    assert run.follow() == []
    assert run.replica.mark == HERE
