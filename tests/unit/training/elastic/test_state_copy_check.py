"""What a program copies from others, and what it gives up for it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.errors import StateTransferError
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.learner import Fetched
from ringfort.training.elastic.protocol import Held, Mark, Replica, Result
from ringfort.training.elastic.run_trace import RunTrace
from ringfort.training.elastic.state_copy import StateCopy
from ringfort.training.elastic.state_tree import StateTree

HERE = Mark("l@1", 4, b"chain", 40)
NEXT = Result("l@1", 5, 50)


def epoch(number: int, lineage: str = "l", ended: tuple[str, ...] = (), peers: str = "b") -> Epoch:
    return Epoch(number, "b", tuple(map(Member, peers)), (), (lineage,), ended)


class Run:
    """A participant, as far as copying needs one."""

    is_finished = is_going = was_slow = False

    def __init__(self, mark: Mark, last: int | None = None) -> None:
        self.state = StateTree({"w": np.zeros(2)})
        self.replica = Replica(
            Data(100, 10, 5, 1), lambda branch: Result(branch, 0, 0), lambda *_: 0, lambda _: 0, mark=mark
        )
        self.last_epoch = None if last is None else epoch(last)
        self.told: list[Any] = []
        self.members = SimpleNamespace(
            epoch=None,
            learned=self.learned,
            news=0,
            sources=tuple,
            wait_for_news=lambda *_: None,
            node=SimpleNamespace(peer_id="a"),
        )
        self.local = SimpleNamespace(layout=None, prepare=lambda layout: None)
        self.offered: list[Any] = []
        self.donor = SimpleNamespace(begin=lambda mark: None, wants_image=True, offer=self.offer)
        self.origin = SimpleNamespace(has_copy=lambda: None)
        self.divergence = SimpleNamespace(origin=0)
        self.meter = SimpleNamespace(speed=1)
        self.ends_with: Callable[[Mark], bool] = lambda mark: mark.step >= 1000
        self.checkpoints = SimpleNamespace(save_apart=lambda *_: "it is kept")
        self.journal = SimpleNamespace(say=lambda *_: None)
        self.trace = RunTrace("test", 100)
        self.copy = StateCopy(self, 30.0)  # pyright: ignore[reportArgumentType]

    def learned(self, epoch: Epoch, stands: Any, *, is_ready: bool) -> None:
        self.told.append((epoch.number, stands.mark, stands.is_pending))
        self.members.epoch = epoch  # an epoch seats it, so that it stops

    def offer(self, image: Any, mark: Mark, epoch: Epoch) -> None:
        self.offered.append((mark, epoch.number))

    def fetch(self, mark: Mark, number: int, lineage: str = "l", ended: tuple[str, ...] = (), peers: str = "b") -> None:
        """Copy the state at `mark` from the members of an epoch."""
        fetched = Fetched(self.state.image(), mark, epoch(number, lineage, ended, peers), None)

        def fetching(check: Any, **_: Any) -> Generator[Fetched, None, Fetched]:
            check(fetched)
            yield fetched
            return fetched

        learner: Any = SimpleNamespace(fetching=fetching)
        list(self.copy._follow(learner, fetched.epoch, None))


def test_a_program_whose_run_went_on_without_it_gives_up_the_result_that_it_holds() -> None:
    """The others stand where it stands, below their minimum: no step will end that it could replay."""
    run = Run(HERE, last=3)
    run.replica.held = Held(3, NEXT)
    run.fetch(HERE, 4)
    assert run.told == [(4, HERE, False)]
    assert run.replica.fence(0).mark == HERE


def test_a_held_result_is_kept_before_members_that_have_not_gone_on_yet() -> None:
    run = Run(HERE, last=3)
    run.replica.held = Held(3, NEXT)
    with pytest.raises(StateTransferError, match="others are in epoch 3"):
        run.fetch(HERE, 3)
    with pytest.raises(StateTransferError, match="others are in epoch 4"):
        run.fetch(HERE, 4, peers="ab")  # which ended for this program before its group was formed
    assert run.replica.fence(0).is_pending
    assert not run.told


def test_a_run_with_more_steps_is_not_given_up_but_a_copy_of_one_is() -> None:
    run = Run(HERE)
    with pytest.raises(StateTransferError, match="others at step 2"):
        run.fetch(Mark("m@1", 2), 9, "m")
    run.copy.is_copy = True  # of a run whose members may have died
    run.fetch(Mark("m@1", 2), 9, "m")
    assert run.replica.mark == Mark("m@1", 2)


def test_a_run_that_has_ended_is_given_up_whatever_its_step() -> None:
    """It went on without this program, and then its last members died."""
    run = Run(HERE, last=3)
    run.fetch(Mark("m@1", 2), 9, "m", ended=("l",))
    assert run.replica.mark == Mark("m@1", 2)


@pytest.mark.parametrize("number", [1, 3])
def test_a_program_that_gave_way_to_another_run_copies_its_state_again(number: int) -> None:
    """The number of the last epoch of its own run means nothing in the other one."""
    run = Run(HERE, last=3)
    run.fetch(Mark("m@1", 20), number, "m")
    run.members.epoch = None
    run.fetch(Mark("m@1", 90), number, "m")
    assert run.replica.mark == Mark("m@1", 90)


def test_a_copy_is_not_replaced_by_an_older_one_of_the_same_branch() -> None:
    run = Run(HERE)
    run.copy.is_copy = True
    with pytest.raises(StateTransferError, match="others at step 3"):
        run.fetch(Mark("l@1", 3), 9)


def test_a_program_in_no_epoch_offers_the_state_of_its_last_one() -> None:
    """To a member that has given it up and is needed for the next epoch."""
    run = Run(HERE, last=3)
    assert not list(run.copy.follow(None))
    assert run.offered == [(HERE, 3)]


@pytest.mark.parametrize("why", ["it was in no epoch", "it has a copy", "it has no state", "nobody asks"])
def test_a_program_that_has_no_state_of_its_last_epoch_offers_none(why: str) -> None:
    run = Run(Mark() if why == "it has no state" else HERE, last=None if why == "it was in no epoch" else 3)
    run.copy.is_copy = why == "it has a copy"
    run.donor.wants_image = why != "nobody asks"
    assert not list(run.copy.follow(None))
    assert not run.offered
