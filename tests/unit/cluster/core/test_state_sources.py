"""Which members a program may copy the state of its run from."""

from __future__ import annotations

from ringfort.cluster.core.membership import Voter
from ringfort.cluster.core.peer_messages import Epoch, Member, Report, RunState, Votes
from ringfort.cluster.core.state_sources import state_sources


def epoch(number: int, peers: str, lineage: str = "a#1") -> Epoch:
    return Epoch(number, peers[0], tuple(map(Member, peers)), (), (lineage,))


def member(of: Epoch, step: int = 5, *, current: bool = True) -> Report:
    return Report(Votes(of.number, of), of.number if current else 0, state=RunState(b"m", of.lineages[0], step))


def voter(me: str, formed: Epoch | None = None) -> Voter:
    return Voter(me, votes=Votes(0 if formed is None else formed.number, formed))


def peers(found: Voter, reports: dict[str, Report]) -> list[str]:
    return [source.peer for source in state_sources(found, reports)]


def test_a_new_peer_copies_from_all_members_of_the_epoch() -> None:
    now = epoch(4, "abc")
    reports = {peer: member(now) for peer in "abc"}
    assert peers(voter("z"), reports) == ["a", "b", "c"]
    assert {source.epoch for source in state_sources(voter("z"), reports)} == {now}


def test_a_member_that_is_behind_or_in_no_epoch_is_not_asked() -> None:
    reports = {"a": member(epoch(6, "ab")), "b": member(epoch(6, "ab")), "c": member(epoch(4, "abc"))}
    reports["d"] = member(epoch(6, "abd"), current=False)
    assert peers(voter("z"), reports) == ["a", "b"]


def test_a_member_whose_epoch_has_just_ended_does_not_become_a_learner() -> None:
    """The others may not have noticed yet. It holds what the next epoch has to settle."""
    last = epoch(4, "abc")
    assert not peers(voter("c", last), {"a": member(last), "b": member(last)})
    assert not peers(voter("c", last), {"a": member(epoch(5, "abc"))})  # it is in that one too, and hears so soon
    assert peers(voter("c", last), {"a": member(epoch(5, "ab"))}) == ["a"]


def test_a_member_that_went_on_does_not_copy_from_one_that_is_left_behind() -> None:
    assert not peers(voter("a", epoch(5, "ab")), {"c": member(epoch(3, "cd"))})


def test_one_that_has_given_its_state_up_copies_again_from_the_newest() -> None:
    last = epoch(4, "abc")
    learner = voter("c", last)
    learner.learn(epoch(5, "ab"))
    assert peers(learner, {"a": member(last), "b": member(epoch(5, "ab"))}) == ["b"]


def test_one_that_copied_another_run_after_it_had_accepted_an_epoch_copies_from_its_members_again() -> None:
    """It is never in that epoch, and the others may not go on without it."""
    accepted, other = epoch(6, "ab"), epoch(1, "x", "x#1")
    learner = voter("a")
    learner.votes = Votes(6, None, (accepted,))
    reports = {"b": member(accepted)}
    assert not peers(learner, reports)  # the commit is on its way
    learner.learn(other)
    assert peers(learner, reports) == ["b"]
    learner.commit(accepted.key)
    assert learner.current is None
    assert peers(learner, reports) == ["b"]


def test_one_that_has_given_up_the_last_epoch_copies_from_its_members_even_if_they_are_in_none() -> None:
    """They wait for this peer: without it they may have no majority."""
    last = epoch(4, "abc")
    learner = voter("a", last)
    waiting = {"b": member(last, current=False)}
    assert not peers(learner, waiting)
    learner.learn(epoch(2, "x", "x#1"))
    assert peers(learner, waiting) == ["b"]
    assert not peers(voter("z"), waiting)
    founding = Report(Votes(4, last), 0, state=RunState())
    copied = Report(Votes(6, last), 0, state=RunState(b"m", "y#1", 5, is_learner=True))
    assert not peers(learner, {"b": founding, "c": copied})  # what they have is not the state of that epoch


def test_of_two_runs_that_meet_the_one_with_more_steps_is_copied() -> None:
    reports = {"a": member(epoch(9, "ab"), step=10), "x": member(epoch(3, "xy", "x#1"), step=700)}
    assert peers(voter("z"), reports) == ["x"]
    assert peers(voter("b", epoch(9, "ab")), reports) == ["x"]  # and the numbers of their epochs mean nothing


def test_witnesses_have_no_state() -> None:
    now = epoch(4, "abw")
    reports = {"a": member(now), "w": Report(Votes(4, now), 4)}
    assert peers(voter("z"), reports) == ["a"]
