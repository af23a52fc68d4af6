"""Proposals that came to nothing: whoever has accepted one learns from its leader that it will never be committed.

Otherwise members that accepted one could need its leader for a majority and be unable to seat it, because a step is
pending: nobody would go on although all are there.
"""

from __future__ import annotations

import pytest

from ringfort.cluster.core.events import Persist
from ringfort.cluster.core.membership import Voter, largest_lawful
from ringfort.cluster.core.peer_messages import (
    Accept,
    Campaign,
    Commit,
    Departed,
    ElectionVote,
    Epoch,
    Member,
    Propose,
    Reject,
    Report,
    RunState,
    Term,
    Votes,
)
from tests.unit.cluster.core.test_peer import Bench, next_epoch, sent


def epoch(number: int, peers: str, leader: str = "") -> Epoch:
    return Epoch(number, leader or peers[0], tuple(map(Member, peers)), (), ("x#1",))


FIRST, SECOND, THIRD = epoch(1, "abc"), epoch(2, "bc", "c"), epoch(3, "ab")


def test_those_who_accepted_what_its_leader_abandoned_go_on_without_it() -> None:
    """`b` and `c` went on without `a`. Then `b` accepted an epoch of `a`, and the network was cut before `a` knew."""
    a, b = Voter("a", votes=Votes(1, FIRST)), Voter("b", votes=Votes(2, SECOND))
    for voter in (a, b):
        proposal = Propose(Term(1, "a"), THIRD, (SECOND,))
        assert voter.objection(proposal) is None
        voter.accept(proposal)
    b.hear("a", a.votes)
    assert largest_lawful("bc", {"b": b.votes, "c": Votes(2, SECOND)}, {}, (), "majority")[0] == []
    a.abandon(())
    assert a.commit(THIRD.key) is None
    b.hear("a", a.votes)
    assert largest_lawful("bc", {"b": b.votes, "c": Votes(2, SECOND)}, {}, (), "majority")[0] == ["b", "c"]


@pytest.mark.parametrize(
    "votes",
    [
        Votes(3, FIRST, (THIRD,)),  # it waits for answers
        Votes(2, FIRST),  # it has proposed the epoch and not accepted it yet
        Votes(3, THIRD),
        Votes(5, epoch(5, "ad")),  # it may have committed this one and gone on to a later one
    ],
)
def test_what_its_leader_may_have_committed_stays_in_doubt(votes: Votes) -> None:
    """If it is forgotten, two groups may follow the epoch before it."""
    b = Voter("b", votes=Votes(3, SECOND, (THIRD,)))
    b.hear("a", votes)
    assert b.votes.doubts == (THIRD,)


def test_a_leader_that_copied_a_state_since_still_shows_what_it_never_committed() -> None:
    """`a` proposed to `b`, nothing came of it, and `a` copied the state of another run. Nobody can seat it while `b`
    holds a result, and `b` could settle nothing without it. The last epoch that `a` has committed stays in its votes,
    whatever it copies: if it had committed this one, it would show."""
    a, b, other = Voter("a", votes=Votes(1, FIRST)), Voter("b", votes=Votes(2, SECOND)), epoch(2, "de", "e")
    for voter in (a, b):
        voter.accept(Propose(Term(1, "a"), THIRD, (SECOND,)))
    a.learn(other)
    b.hear("a", a.votes)
    assert b.votes.doubts == (THIRD,), "it may still commit what it has proposed"
    a.abandon(())
    b.hear("a", a.votes)
    assert (a.votes.formed, b.votes) == (FIRST, Votes(3, SECOND))
    assert largest_lawful("bc", {"b": b.votes, "c": Votes(2, SECOND)}, {}, (), "majority")[0] == ["b", "c"]


def test_a_leader_that_copied_a_state_after_its_commit_does_not_hide_that() -> None:
    a, b = Voter("a", votes=Votes(1, FIRST)), Voter("b", votes=Votes(3, SECOND, (THIRD,)))
    a.accept(Propose(Term(1, "a"), THIRD, (SECOND,)))
    assert a.commit(THIRD.key) == THIRD
    a.learn(epoch(2, "de", "e"))
    a.abandon(())
    b.hear("a", a.votes)
    assert b.votes.doubts == (THIRD,)


def test_only_the_leader_knows_that_a_proposal_came_to_nothing() -> None:
    b = Voter("b", votes=Votes(3, SECOND, (THIRD,)))
    b.hear("c", Votes(7, SECOND))
    assert b.votes.doubts == (THIRD,)


def test_a_leader_forgets_only_what_it_proposed_and_can_no_longer_commit() -> None:
    theirs, old, pending = epoch(4, "ba"), epoch(5, "ab"), epoch(6, "ab")
    a = Voter("a", votes=Votes(6, THIRD, (theirs, old, pending)))
    a.abandon({pending, None})
    assert a.votes == Votes(6, THIRD, (theirs, pending))
    copied = Voter("a", votes=Votes(6, THIRD))
    copied.learn(epoch(2, "ab"))  # what a learner has copied was committed
    before = copied.votes
    copied.abandon(())
    assert copied.votes == before


# --- what a peer tells others, and hears ------------------------------------------------------------------------------


def proposes() -> tuple[Bench, Propose]:
    """n1.b leads, and proposes an epoch to n2.c, on link 2. The disk is slow from now on."""
    bench = Bench()
    bench.meet(2, "n2.c")
    bench.say(2, Report(Votes(), 0, ("n1.b",)))
    messages = list[object]()
    while not any(isinstance(message, Propose) for message in messages):
        messages = list(sent(bench.wait(0.1, 2), 2))
        for term in [message.term for message in messages if isinstance(message, Campaign)]:
            bench.say(2, ElectionVote(term, True))
    bench.writes = False
    return bench, next(message for message in messages if isinstance(message, Propose))


def test_a_leader_reports_that_a_proposal_came_to_nothing() -> None:
    bench, proposal = proposes()
    assert bench.core.voter.votes.doubts == (proposal.epoch,)
    out = bench.say(2, Reject(proposal.epoch.number, "no"))
    told = [message.votes for message in sent(out, 2) if isinstance(message, Report)]
    assert told[-1] == Votes(proposal.epoch.number)


def test_a_proposal_whose_commit_is_being_written_has_not_come_to_nothing() -> None:
    bench, proposal = proposes()
    out = bench.say(2, Accept(proposal.epoch.number))
    (written,) = [instruction.votes for instruction in out if isinstance(instruction, Persist)]
    bench.wait(0.1, 2)
    assert bench.core.voter.votes.doubts == (proposal.epoch,)
    bench.do(bench.core.persisted(bench.now, written))
    assert bench.core.epoch == proposal.epoch


def test_a_proposal_whose_commit_the_disk_may_have_has_not_come_to_nothing() -> None:
    """A later process of the leader's machine may find it committed: then two groups would follow the epoch before."""
    bench, proposal = proposes()
    out = bench.say(2, Accept(proposal.epoch.number))
    (written,) = [instruction.votes for instruction in out if isinstance(instruction, Persist)]
    bench.do(bench.core.persisted(bench.now, written, "input/output error"))
    bench.wait(0.1, 2)
    assert bench.core.epoch is None
    assert bench.core.voter.votes.doubts[0] == proposal.epoch
    bench.writes = True  # the disk is well again, and the next proposal is accepted: the record of the first is gone
    while bench.core.voter.votes.highest == proposal.epoch.number:
        bench.wait(0.1, 2)
    bench.say(2, Reject(bench.core.voter.votes.highest, "no"))
    assert proposal.epoch not in bench.core.voter.votes.doubts


def test_a_leader_that_copies_a_state_while_its_commit_is_written_commits_nothing() -> None:
    """The votes of the copy are written after the commit, and do not show it. If the members were told of it, and the
    leader died, the next process of its machine would say that the epoch was never committed."""
    bench, proposal = proposes()
    out = bench.say(2, Accept(proposal.epoch.number))
    (first,) = [instruction.votes for instruction in out if isinstance(instruction, Persist)]
    assert first.formed == proposal.epoch
    out = bench.do(bench.core.learned(bench.now, epoch(2, "de"), RunState(b"mark", "x#1", 5)))
    (second,) = [instruction.votes for instruction in out if isinstance(instruction, Persist)]
    assert second.formed is None
    out = bench.do(bench.core.persisted(bench.now, first))
    assert not any(isinstance(message, Commit) for message in sent(out, 2))
    assert proposal.epoch in bench.core.voter.votes.doubts, "the disk may still have the commit"
    bench.do(bench.core.persisted(bench.now, second))
    assert proposal.epoch not in bench.core.voter.votes.records


def test_a_leader_that_has_copied_a_state_commits_nothing_that_it_proposed_before() -> None:
    bench, proposal = proposes()
    bench.writes = True
    bench.do(bench.core.learned(bench.now, epoch(2, "de"), RunState(b"mark", "x#1", 5)))
    out = bench.say(2, Accept(proposal.epoch.number))
    assert not any(isinstance(message, Commit) for message in sent(out, 2))
    assert not any(isinstance(one, Persist) and one.votes.formed is not None for one in out)
    assert proposal.epoch not in bench.core.voter.votes.records


def test_a_member_hears_from_the_machine_of_a_dead_leader_that_an_epoch_was_committed() -> None:
    """The leader died before it could say so. Nobody else knows, and no epoch can follow that does not know."""
    bench = Bench()
    last = bench.in_epoch()
    proposal = next_epoch(bench, "ab")
    bench.say(1, proposal)
    assert bench.core.voter.votes.doubts == (proposal.epoch,)
    bench.meet(7, "n0.later")
    bench.say(7, Departed("n0.a", Votes(proposal.epoch.number, proposal.epoch), died=True))
    assert bench.core.voter.votes == Votes(proposal.epoch.number, proposal.epoch)
    assert last != proposal.epoch


def test_a_member_hears_from_the_leader_that_a_proposal_came_to_nothing() -> None:
    bench = Bench()
    last = bench.in_epoch()
    bench.say(1, next_epoch(bench, "ab"))
    assert bench.core.voter.votes.doubts
    bench.say(1, Report(Votes(4, last), 0, ("n1.b", "n2.c")))
    assert bench.core.voter.votes == Votes(4, last)
