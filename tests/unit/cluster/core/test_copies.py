"""A member that has copied another state is no holder of its earlier epochs, and its lineages may end with that."""

from __future__ import annotations

from ringfort.cluster.core.membership import Voter, copied_by, heritage, is_lawful, largest_lawful
from ringfort.cluster.core.peer_messages import Epoch, Member, Propose, Report, RunState, Term, Votes
from ringfort.cluster.core.run_members import Evidence, run_members

FIRST = Epoch(1, "a", (Member("a"), Member("b")), lineages=("a#1",))
ALONE = Epoch(2, "a", (Member("a"),), lineages=("a#1",))
"""The lowest id of half of the members has gone on without b."""
OTHER = Epoch(4, "c", (Member("c"),), lineages=("c#1",))


def gave_up() -> Voter:
    """Member a, which was alone in its run and has copied that of c."""
    voter = Voter("a", votes=Votes(2, ALONE))
    voter.learn(OTHER)
    return voter


def test_votes_say_since_when_earlier_states_are_gone() -> None:
    voter = gave_up()
    assert voter.votes.copied_at == voter.votes.highest == 4
    assert voter.is_learner
    assert voter.has_given_up(ALONE)
    voter.learn(FIRST)
    assert voter.votes.copied_at == 5


def test_an_epoch_from_before_the_last_one_is_not_committed_once_its_state_is_copied() -> None:
    """a went on with d, gave that up, and copied the state of b, which is still in the first epoch. If the word of b
    made that one a's last, a and b would be its majority, and compute again what d has sealed alone."""
    voter = Voter("a", votes=Votes(3, last := Epoch(3, "a", (Member("a"), Member("d")), lineages=("a#1",))))
    voter.learn(OTHER)
    voter.learn(FIRST)
    assert voter.commit(FIRST.key) is None
    assert voter.votes.records == (last, FIRST)
    group, _ = largest_lawful("ab", {"a": voter.votes, "b": Votes(1, FIRST)}, {}, (), "majority")
    assert "a" not in group


def test_a_group_needs_somebody_who_still_holds_the_state() -> None:
    assert is_lawful("ab", FIRST, (), "majority", {"a": 4})
    assert not is_lawful("a", FIRST, (), "majority", {"a": 4})
    assert is_lawful("a", FIRST, (), "majority", {"a": 1})  # that was before


def test_a_lineage_without_a_holder_has_ended_even_if_members_are_there_that_are_behind() -> None:
    """Otherwise a and b would compute the steps again that a has sealed alone."""
    votes = {"a": gave_up().votes, "b": Votes(1, FIRST)}
    group, basis = largest_lawful("ab", votes, {"c": Votes(4, OTHER)}, (), "majority")
    assert set(group) == {"a", "b"}
    assert heritage(basis.formed, group, "c", copied_by(votes, group)) == ((), ("a#1", "c#1"))
    reports = {"a": Report(votes["a"], state=RunState()), "b": Report(votes["b"], state=RunState(b"m", "a#1", 7))}
    chosen, at = run_members("b", reports, (), Evidence({"c": Votes(4, OTHER)}))
    assert (set(chosen), at) == ({"a", "b"}, RunState())


def test_a_proposal_that_takes_one_for_a_holder_is_refused_by_it() -> None:
    voter = gave_up()
    members = (Member("a"), Member("b"))

    def proposal(*copied_at: tuple[str, int]) -> Propose:
        epoch = Epoch(9, "b", members, lineages=("b#9",), ended=("a#1",))
        return Propose(Term(1, "b"), epoch, (ALONE,), (), ("c",), (), RunState(), copied_at)

    assert "which state I have given up" in str(voter.objection(proposal()))
    assert "which state I have given up" in str(voter.objection(proposal(("a", 3))))
    assert voter.objection(proposal(("a", 4))) is None


def test_what_one_has_copied_stays_known_when_it_votes_again() -> None:
    voter = gave_up()
    epoch = Epoch(9, "a", (Member("a"), Member("c")), lineages=("c#1",))
    voter.accept(Propose(Term(1, "a"), epoch))
    assert voter.votes.copied_at == 4
    voter.commit(epoch.key)
    assert (voter.votes.copied_at, voter.is_learner) == (4, False)
    assert not voter.has_given_up(epoch)


def test_of_two_runs_that_have_not_begun_the_one_stays_whose_first_state_was_sent() -> None:
    """The other cannot go on alone: its second member has moved on."""
    left = Epoch(10, "d", (Member("c"), Member("d")), lineages=("d#10",))
    now = Epoch(11, "a", (Member("a"), Member("b"), Member("c")), lineages=("a#11",))
    pending = RunState(b"", "a#11", -1, is_pending=True)
    reports = {p: Report(Votes(11, now), state=pending) for p in "abc"}
    reports["d"] = Report(Votes(10, left), state=RunState(step=-1))
    assert set(run_members("a", reports, (), Evidence({}))[0]) == {"a", "b", "c"}
    assert run_members("d", reports, (), Evidence({}))[0] == []
