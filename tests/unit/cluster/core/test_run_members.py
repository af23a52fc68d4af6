"""Which peers of an elastic run a leader wants in the next epoch: none is left out for good after a fault."""

from __future__ import annotations

import pytest

from ringfort.cluster.core.membership import Voter
from ringfort.cluster.core.peer_messages import Epoch, Member, Propose, Report, RunState, Term, Votes
from ringfort.cluster.core.run_members import Evidence, run_members

NOWHERE = RunState()


def epoch(number: int, peers: str, lineages: str = "l", ended: tuple[str, ...] = ()) -> Epoch:
    """An epoch that its first member led. Each letter of `lineages` is one."""
    return Epoch(number, peers[0], tuple(map(Member, peers)), (), tuple(lineages), ended)


def there(step: int, lineage: str = "l", **flags: bool) -> RunState:
    return RunState(f"{lineage}@{step}".encode(), lineage, step, **flags)


def report(formed: Epoch | None, state: RunState, *, current: bool = False, doubts: tuple[Epoch, ...] = ()) -> Report:
    number = max((e.number for e in (formed, *doubts) if e is not None), default=0)
    return Report(Votes(number, formed, doubts), formed.number if formed and current else 0, state=state)


def chosen(
    me: str, reports: dict[str, Report], departed: dict[str, Votes] | None = None
) -> tuple[str, RunState | None]:
    peers, at = run_members(me, reports, (), Evidence(departed or {}))
    return "".join(sorted(peers)), at


def test_peers_without_a_run_begin_one_together() -> None:
    assert chosen("a", {"a": report(None, NOWHERE), "b": report(None, NOWHERE)}) == ("ab", NOWHERE)


def test_who_stands_where_the_members_stand_is_seated_when_all_are_ready() -> None:
    here = there(7, is_ready=True)
    reports = {peer: report(epoch(3, "ab"), here, current=True) for peer in "ab"}
    reports["c"] = report(None, there(7, is_ready=True, is_learner=True))
    assert chosen("a", reports) == ("abc", here)
    reports["c"] = report(None, there(6, is_ready=True, is_learner=True))
    assert chosen("a", reports)[0] == "ab"
    reports["c"] = report(None, there(7, is_learner=True))
    assert chosen("a", reports)[0] == "ab"


def test_a_learner_that_only_follows_keeps_no_other_one_waiting() -> None:
    here = there(7, is_ready=True)
    reports = {"a": report(epoch(3, "a"), here, current=True)}
    reports["b"] = report(None, there(7, is_learner=True))
    reports["c"] = report(None, there(7, is_ready=True, is_learner=True))
    assert chosen("a", reports) == ("ac", here)
    reports["a"] = report(epoch(3, "a"), there(7), current=True)  # in the middle of a step
    assert chosen("a", reports) == ("a", None)


def test_of_two_runs_that_meet_the_one_with_more_steps_leads() -> None:
    reports = {"a": report(epoch(1, "a", "l"), there(5, "l")), "b": report(epoch(1, "b", "m"), there(9, "m"))}
    assert chosen("a", reports) == ("", None)
    assert chosen("b", reports) == ("b", there(9, "m"))


def test_a_run_does_not_wait_for_one_with_more_steps_that_lacks_its_majority() -> None:
    """`c` and `d` may be at work elsewhere. Nobody knows when they come back."""
    reports = {"a": report(epoch(1, "a", "l"), there(5, "l")), "b": report(epoch(1, "bcd", "m"), there(9, "m"))}
    assert chosen("a", reports) == ("a", there(5, "l"))
    reports["c"] = report(epoch(1, "bcd", "m"), there(9, "m"))
    assert chosen("a", reports) == ("", None)


def test_a_run_does_not_wait_for_one_that_needs_its_word_to_go_on() -> None:
    """`c` proposed an epoch of all and gave it up, because `b` holds a first state. `a` has accepted that epoch: it
    cannot go on until `c`, which alone knows that nothing came of it, is in an epoch with it. So `c` leads."""
    first, other, given_up = epoch(1, "ab", "l"), epoch(1, "c", "m"), epoch(2, "cabde", "lm")
    reports = {
        "a": report(first, NOWHERE, doubts=(given_up,)),
        "b": report(first, RunState(lineage="l", is_pending=True)),
        "c": report(other, NOWHERE, doubts=(given_up,)),
        "d": report(None, NOWHERE, doubts=(given_up,)),
        "e": report(None, NOWHERE, doubts=(given_up,)),
    }
    peers, at = chosen("c", reports)
    assert peers == "acde"
    assert at is not None
    assert at.mark == b""


def test_a_peer_that_the_run_went_on_without_leads_nobody() -> None:
    reports = {"a": report(epoch(3, "abc"), there(5)), "b": report(epoch(4, "bc"), there(5))}
    assert chosen("a", reports) == ("", None)


def test_runs_that_became_one_before_they_began_wait_for_nobody_they_left_behind() -> None:
    """`c` knows only its own lineage, `m`, which goes on in the epoch of `a` as its second one."""
    both = epoch(4, "ba", "lm")
    reports = {"a": report(both, NOWHERE), "c": report(epoch(1, "bc", "m"), NOWHERE)}
    departed = {"b": Votes(4, both)}
    peers, at = chosen("a", reports, departed)
    assert peers == "ac"
    assert at is not None
    assert at.mark == b""
    assert chosen("c", reports, departed) == ("", None)


def test_a_first_state_that_a_later_epoch_left_behind_keeps_nobody_waiting() -> None:
    """`c` holds the first state of `m`. The epoch of `a` and `b` continues `m` without it, so nobody applied that."""
    both = epoch(5, "ab", "lm")
    reports = {peer: report(both, NOWHERE) for peer in "ab"}
    reports["c"] = report(epoch(4, "bc", "m"), RunState(lineage="m", is_pending=True))
    peers, at = chosen("a", reports)
    assert peers == "ab"
    assert at is not None
    assert at.mark == b""


@pytest.mark.parametrize("leader", ["b", "c", "d"])
def test_members_that_left_the_founding_epoch_belong_to_its_run(leader: str) -> None:
    """One member has not noticed that the others lost each other for a moment, and waits for them in the epoch."""
    first = epoch(2, "abcd")
    reports = {peer: report(first, NOWHERE, current=peer == "a") for peer in "abcd"}
    reports["e"] = report(None, NOWHERE)
    peers, at = chosen(leader, reports)
    assert peers == "abcde"
    assert at is not None
    assert at.mark == b""


def test_a_newcomer_does_not_disturb_the_epoch_that_founds_the_run() -> None:
    """What its members last told is from before the founding."""
    reports = {peer: report(epoch(2, "ab"), NOWHERE, current=True) for peer in "ab"}
    reports["c"] = report(None, NOWHERE)
    assert chosen("c", reports) == ("", None)


def test_the_last_one_in_the_founding_epoch_makes_it_again_with_all_members() -> None:
    reports = {peer: report(epoch(2, "abcd"), NOWHERE, current=peer == "a") for peer in "abcd"}
    assert chosen("a", reports) == ("abcd", None)


@pytest.mark.parametrize("leader", "bc")
def test_the_copy_of_a_run_that_has_ended_keeps_nobody_out_of_another_one(leader: str) -> None:
    """`b` is needed for the majority, and has copied the state of a run whose members have all died since."""
    first, other = epoch(4, "abc"), epoch(6, "xy", "m")
    departed = {"a": Votes(4, first), "x": Votes(6, other), "y": Votes(6, other)}
    reports = {
        "b": report(first, there(2, "m", is_learner=True), doubts=(other,)),
        "c": report(first, NOWHERE),
        "d": report(None, NOWHERE),
    }
    peers, at = chosen(leader, reports, departed)
    assert peers == "bcd"
    assert at is not None
    assert at.mark == b""


def test_an_epoch_that_a_member_has_left_for_good_is_not_waited_for() -> None:
    """`a` copied the state of another run, which has ended since: it is a learner without a state."""
    first = epoch(7, "ab")
    reports = {
        "a": Report(Votes(8, first), state=RunState(is_learner=True)),
        "b": report(first, NOWHERE, current=True),
        "c": report(None, NOWHERE),
    }
    peers, at = chosen("b", reports)
    assert peers == "abc"
    assert at is not None


def test_what_is_chosen_is_accepted_by_a_member_that_gives_up_the_state_of_a_run_that_has_ended() -> None:
    first, other = epoch(4, "bc"), epoch(6, "x", "m")
    departed = {"x": Votes(6, other)}
    voter = Voter("b", votes=Votes(6, first, (other,), 6))
    peers, at = run_members(
        "c",
        {"b": report(first, there(2, "m", is_learner=True), doubts=(other,)), "c": report(first, NOWHERE)},
        (),
        Evidence(departed),
    )
    new = Epoch(7, "c", tuple(map(Member, sorted(peers))), (), ("l",), ("m",))
    proposal = Propose(Term(1, "c"), new, (first, other), (), ("x",), (), at, (("b", 6),))
    assert voter.objection(proposal) is None
    assert voter.state_objection(proposal, NOWHERE) is None
    assert voter.state_objection(proposal, there(2, "m")) is not None


def test_a_member_that_became_a_learner_is_not_asked_into_an_epoch_that_only_shrinks() -> None:
    last = epoch(5, "abc")
    copied = Report(Votes(6, last), state=there(29, is_learner=True))
    reports = {"a": report(last, there(30, is_pending=True)), "b": report(last, there(30)), "c": copied}
    assert chosen("a", reports) == ("ab", None)
