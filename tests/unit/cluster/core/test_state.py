"""Whom a person's `restart_without` stands for, and what a peer says of itself."""

from __future__ import annotations

import pytest

from ringfort.cluster.core.peer_messages import Epoch, Member, Report, RunState, Votes
from ringfort.cluster.core.proposer import Proposer
from ringfort.cluster.core.state import PeerState
from ringfort.config import AutoDiscoveryConfig

ME = Member("me.2", "mine", 1, ("mine:1",), name="study")
LAST = Epoch(
    1,
    "me.1",
    (
        Member("me.1", "mine", 1, ("mine:1",), name="study"),
        Member("one.1", "first", 1, ("first:1",), name="raspberrypi"),
        Member("two.1", "second", 1, ("second:1",), name="raspberrypi"),
        Member("two.2", "second", 1, ("second:1",), name="raspberrypi"),
        Member("three.1", "third", 1, ("third:1",), name="attic"),
    ),
    lineages=("me.1#1",),
)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([], ()),
        (["attic"], ("three.1",)),
        (["three"], ("three.1",)),
        (["raspberrypi"], ()),  # which of the two?
        (["two"], ("two.1", "two.2")),
        (["two.2", "attic"], ("three.1", "two.2")),
        (["garage"], ()),
    ],
)
def test_a_name_that_several_machines_have_stands_for_none_of_them(said: list[str], found: tuple[str, ...]) -> None:
    state = PeerState(ME, AutoDiscoveryConfig(restart_without=said), 0.0, lambda: 0)
    state.recall([Votes(1, LAST)])
    assert state.restart_without == found


# --- learners of elastic runs -----------------------------------------------------------------------------------------


def learner() -> PeerState:
    """A peer that was in an epoch, and has copied the state of another run since."""
    state = PeerState(ME, AutoDiscoveryConfig(), 0.0, lambda: 0)
    state.voter.votes = Votes(5, Epoch(5, "me.2", (ME,), lineages=("me.2#5",)))
    state.voter.learn(Epoch(1, "one.1", (LAST.members[1],), lineages=("one.1#1",)))
    state.run_state = RunState(b"mark", "one.1#1", 30, is_ready=True)
    return state


def test_a_learner_does_not_claim_to_lead_for_the_epoch_that_it_was_in_before() -> None:
    state = learner()
    report = state.own_report().state
    assert report is not None
    assert report.is_learner
    member = PeerState(LAST.members[1], AutoDiscoveryConfig(), 0.0, lambda: 0)
    member.voter.votes = Votes(1, Epoch(1, "one.1", (LAST.members[1],), lineages=("one.1#1",)))
    member.run_state = RunState(b"mark", "one.1#1", 30, is_ready=True)
    assert member.own_claim() < state.own_claim()


def test_a_member_that_became_a_learner_is_not_asked_into_an_epoch_that_only_shrinks() -> None:
    state = PeerState(ME, AutoDiscoveryConfig(), 0.0, lambda: 0)
    last = Epoch(5, "me.2", (ME, *LAST.members[1:3]), lineages=("me.2#5",))
    state.voter.votes = Votes(5, last)
    state.run_state = RunState(b"mark", "me.2#5", 30, is_pending=True)
    there = Report(Votes(5, last), state=RunState(b"mark", "me.2#5", 30))
    copied = Report(Votes(6, last), state=RunState(b"old", "me.2#5", 29, is_learner=True))
    reports = {"me.2": state.own_report(), "one.1": there, "two.1": copied}
    assert Proposer(state)._same_run(list(reports), reports) == (["me.2", "one.1"], None)


def test_a_learner_that_only_follows_keeps_no_other_one_waiting() -> None:
    state = PeerState(ME, AutoDiscoveryConfig(), 0.0, lambda: 0)
    state.voter.votes = Votes(5, Epoch(5, "me.2", (ME,), lineages=("me.2#5",)))
    state.voter.current = state.voter.votes.formed
    state.run_state = RunState(b"mark", "me.2#5", 30, is_ready=True)
    follows = Report(Votes(), state=RunState(b"mark", "me.2#5", 30, is_learner=True))
    waits = Report(Votes(), state=RunState(b"mark", "me.2#5", 30, is_learner=True, is_ready=True))
    reports = {"me.2": state.own_report(), "one.1": follows, "two.1": waits}
    assert Proposer(state)._same_run(list(reports), reports) == (["me.2", "two.1"], state.own_report().state)
    state.run_state = RunState(b"mark", "me.2#5", 30)  # in the middle of a step
    reports["me.2"] = state.own_report()
    assert Proposer(state)._same_run(list(reports), reports) == (["me.2"], None)
