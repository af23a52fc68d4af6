"""The law of membership, rule by rule."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ringfort.cluster.core.membership import (
    Policy,
    Voter,
    basis_of,
    heritage,
    is_binding,
    is_covered,
    is_lawful,
    largest_lawful,
    promised_by,
    seat,
)
from ringfort.cluster.core.peer_messages import MAX_DOUBTS, Epoch, Member, Propose, RunState, Term, Votes

NOBODY = ""


def epoch(
    number: int, peers: str, leader: str = "", lineages: tuple[str, ...] = ("x#1",), ended: tuple[str, ...] = ()
) -> Epoch:
    return Epoch(number, leader or peers[0], tuple(map(Member, peers)), (), lineages, ended)


def proposal(new: Epoch, formed: tuple[Epoch, ...] = (), doubts: tuple[Epoch, ...] = (), departed: str = "") -> Propose:
    return Propose(Term(1, new.leader), new, formed, doubts, tuple(departed))


# --- who may go on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "before", "lawful"),
    [
        ("abc", "abcde", True),
        ("ab", "abcde", False),
        ("ab", "abcd", True),  # half, with the lowest id
        ("cd", "abcd", False),
        ("a", "ab", True),
        ("b", "ab", False),
        ("cdxyz", "abcde", False),  # newcomers do not count
        ("x", "a", False),
    ],
)
def test_more_than_half_or_half_with_the_lowest_id_goes_on(group: str, before: str, lawful: bool) -> None:
    assert is_lawful(group, epoch(1, before), NOBODY, "majority") is lawful


@pytest.mark.parametrize(("policy", "lawful"), [("majority", False), ("stop", False), ("continue", True)])
def test_a_person_may_choose_otherwise(policy: Policy, lawful: bool) -> None:
    assert is_lawful("b", epoch(1, "ab"), NOBODY, policy) is lawful


def test_stop_waits_for_everyone_who_may_live() -> None:
    assert not is_lawful("abcd", epoch(1, "abcde"), NOBODY, "stop")
    assert is_lawful("abcd", epoch(1, "abcde"), "e", "stop")


def test_the_departed_do_not_count() -> None:
    assert is_lawful("b", epoch(1, "ab"), "a", "majority")
    assert is_lawful("c", epoch(1, "abc"), "ab", "majority")


def test_nobody_can_be_split_from_a_peer_alone() -> None:
    assert is_lawful("x", epoch(1, "a", lineages=()), NOBODY, "majority")


PEERS = "abcdefg"
groups = st.sets(st.sampled_from(PEERS), min_size=1)


@given(before=groups, one=groups, other=groups, dead=st.sets(st.sampled_from(PEERS)))
def test_two_lawful_successors_always_share_a_member(
    before: set[str], one: set[str], other: set[str], dead: set[str]
) -> None:
    old = epoch(1, "".join(sorted(before)))
    one, other = one - dead, other - dead
    if before - dead and is_lawful(one, old, dead, "majority") and is_lawful(other, old, dead, "majority"):
        assert one & other & before


def test_a_line_that_nobody_is_left_of_is_followed_but_not_carried_on() -> None:
    old, other = epoch(6, "ab"), epoch(5, "cd", lineages=("y#2",))
    dead = "ab"
    assert heritage([old, other], "cd", dead) == (("y#2",), ("x#1",))
    assert heritage([old], "b", dead) == (("x#1",), ()), "b is in the group, so it lives"
    assert heritage([old], "c", "a") == (("x#1",), ())
    after = epoch(7, "cd", lineages=("y#2",), ended=("x#1",))
    assert is_covered(old, [after])
    assert not is_covered(epoch(8, "ab"), [after])
    assert heritage([after], "cd", NOBODY) == (("y#2",), ("x#1",)), "who returns from it must still hear of its end"


# --- what a new epoch rests on ---------------------------------------------------------------------------------------


def test_the_last_epoch_of_each_line_counts() -> None:
    old, new, elsewhere = epoch(1, "abc"), epoch(4, "abc"), epoch(2, "de", lineages=("y#2",))
    basis = basis_of([Votes(1, old), Votes(4, new), Votes(2, elsewhere)], "")
    assert basis.formed == (elsewhere, new)
    assert heritage(basis.formed, "abcde", NOBODY) == (("y#2", "x#1"), ())
    assert basis.highest == 4


def test_a_doubt_counts_until_a_later_epoch_of_its_lines_is_committed() -> None:
    formed, doubt = epoch(3, "abc"), epoch(5, "ab")
    assert basis_of([Votes(5, formed, (doubt,))], "").doubts == (doubt,)
    assert basis_of([Votes(5, formed, (doubt,)), Votes(6, epoch(6, "abc"))], "").doubts == ()
    assert not is_covered(epoch(5, "ab", lineages=("x#1", "y#2")), [epoch(6, "abc")])


def test_what_may_never_have_been_committed_hands_down_no_line() -> None:
    merger = epoch(5, "abcd", "d", ("x#1", "y#2"))
    formed = basis_of([Votes(5, epoch(3, "abc"), (merger,))], "abc").formed
    assert heritage(formed, "abc", NOBODY)[0] == ("x#1",)
    assert basis_of([Votes(5, None, (merger,))], "abc").formed == ()


def test_a_doubt_is_none_when_the_leader_who_alone_could_commit_it_answers() -> None:
    votes = Votes(5, epoch(3, "abc"), (epoch(5, "ab"),))
    assert basis_of([votes], "a").doubts == ()


def test_what_one_peer_doubts_and_another_knows_to_be_committed_is_no_doubt() -> None:
    ended, ending, last = epoch(1, "ab"), epoch(2, "cd", "c", ("y#2",), ("x#1",)), epoch(3, "cd", "c", ("y#2",))
    knowing = [Votes(1, ended), Votes(2, ending), Votes(3, last)]
    assert basis_of([*knowing, Votes(1, None, (ended,))], "").doubts == ()


def test_who_holds_what_the_group_has_no_majority_of_must_wait() -> None:
    cut_off = Votes(3, epoch(3, "abc"))
    group, basis = largest_lawful("cxy", {"c": cut_off, "x": Votes(), "y": Votes()}, {}, (), "majority")
    assert group == ["x", "y"]
    assert basis.formed == ()


def test_a_returning_minority_joins_those_who_went_on() -> None:
    old, new = Votes(3, epoch(3, "abc")), Votes(4, epoch(4, "ab"))
    group, basis = largest_lawful("abc", {"a": new, "b": new, "c": old}, {}, (), "majority")
    assert group == ["a", "b", "c"]
    assert [e.number for e in basis.formed] == [4]


def test_the_last_promises_of_the_dead_are_kept() -> None:
    mine, theirs = Votes(3, epoch(3, "ab")), Votes(4, epoch(3, "ab"), (epoch(4, "ax", "x"),))
    alone = largest_lawful("b", {"b": mine}, {"a": theirs}, (), "majority")
    assert alone[0] == []  # a may have gone on with x, who may be at work
    assert largest_lawful("b", {"b": mine}, {"a": mine}, (), "majority")[0] == ["b"]


def test_one_that_a_person_does_not_count_answers_for_nothing() -> None:
    """The epoch in doubt was proposed by a, whom the person does not wait for: b and c still count in it."""
    recalled = Votes(3, None, (epoch(3, "abcd"),))
    for present, lawful in (("x", []), ("xbc", ["x", "b", "c"])):
        all_votes = {"x": recalled, "b": Votes(3, epoch(3, "abcd")), "c": Votes(3, epoch(3, "abcd"))}
        departed = {"d": Votes(3, epoch(3, "abcd"))}
        assert largest_lawful(present, all_votes, departed, "a", "majority")[0] == lawful


def test_a_reset_between_one_and_the_rest_lets_one_side_go_on_at_most() -> None:
    """A reset proves nothing about a process: no side may take the other for dead."""
    in_four = Votes(3, epoch(3, "abcd"))
    sides = [largest_lawful(side, dict.fromkeys(side, in_four), {}, (), "majority")[0] for side in ("a", "bcd")]
    assert sides == [[], ["b", "c", "d"]]


# --- what a peer promises --------------------------------------------------------------------------------------------


@pytest.fixture
def voter() -> Voter:
    """Of b, who is in epoch 3 with a and c."""
    made = Voter("b")
    made.accept(proposal(epoch(3, "abc")))
    made.commit((3, "a"))
    return made


def test_a_peer_is_in_an_epoch_from_its_commit_until_it_accepts_the_next(voter: Voter) -> None:
    assert voter.current == epoch(3, "abc")
    assert voter.accept(proposal(epoch(4, "ab"), (epoch(3, "abc"),))) == epoch(3, "abc")
    assert voter.current is None
    assert voter.commit((4, "a")) == epoch(4, "ab")
    assert voter.votes == Votes(4, epoch(4, "ab"))


@pytest.mark.parametrize(
    ("offer", "why"),
    [
        (proposal(epoch(3, "abc", "c"), (epoch(3, "abc"),)), "not above"),
        (proposal(epoch(4, "ac"), (epoch(3, "abc"),)), "do not include the leader and this peer"),
        (proposal(epoch(4, "abb"), (epoch(3, "abc"),)), "do not include the leader and this peer"),
        (proposal(epoch(4, "ab", "c"), (epoch(3, "abc"),)), "do not include the leader and this peer"),
        (proposal(epoch(4, "ab", lineages=()), (epoch(3, "abc"),)), "no lineage"),
        (proposal(epoch(4, "ab", lineages=("y#4",)), (epoch(3, "abc"),)), "forgets a lineage"),
        (
            proposal(
                epoch(4, "ab", lineages=("x#1", "y#2")), (epoch(3, "abc"), epoch(2, "de", lineages=("y#2",))), (), "de"
            ),
            "has no living member",
        ),
        (
            proposal(epoch(4, "ab", ended=("y#2",)), (epoch(3, "abc"), epoch(2, "ade", lineages=("y#2",))), (), "d"),
            "forgets a lineage",
        ),
        (proposal(epoch(4, "ab", ended=("y#2",)), (epoch(3, "abc"),)), "ends a lineage"),
        (proposal(epoch(4, "ab")), "does not know of epoch 3"),
        (proposal(epoch(4, "ab"), (epoch(2, "ab"),)), "does not know of epoch 3"),
        (proposal(epoch(4, "bx"), (epoch(3, "abc"),)), "majority of epoch 3"),
        (proposal(epoch(5, "ab"), (epoch(3, "abc"),), (epoch(4, "acd", "d"),)), "majority of epoch 4"),
    ],
)
def test_a_peer_refuses_what_breaks_the_law_and_says_why(voter: Voter, offer: Propose, why: str) -> None:
    assert why in (voter.objection(offer) or "")


def test_a_peer_accepts_what_keeps_the_law(voter: Voter) -> None:
    assert voter.objection(proposal(epoch(4, "abx"), (epoch(3, "abc"),))) is None
    assert voter.objection(proposal(epoch(4, "b"), (epoch(3, "abc"),), departed="ac")) is None
    assert voter.objection(proposal(epoch(9, "ab"), (epoch(8, "ac"),))) is None  # epoch 8 has followed epoch 3


def test_what_was_accepted_and_not_committed_stays_in_doubt_unless_its_leader_gives_it_up(voter: Voter) -> None:
    base = (epoch(3, "abc"),)
    voter.accept(proposal(epoch(4, "ab"), base))
    voter.accept(proposal(epoch(5, "bc", "c"), base, (epoch(4, "ab"),)))
    assert [d.number for d in voter.votes.doubts] == [4, 5]
    voter.accept(proposal(epoch(6, "bc", "c"), base, (epoch(4, "ab"),)))
    assert [d.number for d in voter.votes.doubts] == [4, 6]


def test_what_its_leader_committed_before_the_next_proposal_stays_in_doubt_until_the_peer_hears_that(
    voter: Voter,
) -> None:
    """Otherwise it would never know its own last epoch, and take the others' next one for one that grows."""
    base = (epoch(3, "abc"),)
    voter.accept(proposal(epoch(4, "bc", "c"), base))  # and c commits it, which b hears late
    voter.accept(proposal(epoch(5, "ab"), base, (epoch(4, "bc", "c"),)))  # and a commits it
    voter.accept(proposal(epoch(6, "ab"), (epoch(5, "ab"),)))
    voter.commit((4, "c"))
    voter.commit((5, "a"))
    assert voter.votes == Votes(6, epoch(5, "ab"), (epoch(6, "ab"),))
    shrinking = proposal(epoch(7, "ab"), (epoch(5, "ab"),), (epoch(6, "ab"),))
    assert voter.state_objection(shrinking, RunState(b"mark", "x#1", 7, is_pending=True)) is None


def test_an_earlier_epoch_that_turns_out_committed_is_known_but_not_entered(voter: Voter) -> None:
    voter.accept(proposal(epoch(4, "ab"), (epoch(3, "abc"),)))
    voter.accept(proposal(epoch(5, "bc", "c"), (epoch(3, "abc"),), (epoch(4, "ab"),)))
    assert voter.commit((4, "a")) is None
    assert voter.current is None
    assert voter.votes == Votes(5, epoch(4, "ab"), (epoch(5, "bc", "c"),))


def test_doubts_have_a_limit(voter: Voter) -> None:
    base = (epoch(3, "abc"),)
    for number in range(MAX_DOUBTS):
        voter.accept(proposal(epoch(4 + number, "ab", f"leader{number}"), base))
    assert "too many" in (voter.objection(proposal(epoch(99, "ab"), base)) or "")


# --- restarts --------------------------------------------------------------------------------------------------------


def test_a_new_process_respects_what_earlier_ones_of_its_machine_were_in() -> None:
    """c was in epoch 3 with two others; it ended, and d is the next process of its machine."""
    old = epoch(3, "abc")
    restarted = Voter("d")
    restarted.recall([Votes(3, old)])
    assert restarted.votes == Votes(3, None, (old,))
    assert "not above 3" in (restarted.objection(proposal(epoch(2, "dx"))) or "")
    assert "does not know of epoch 3" in (restarted.objection(proposal(epoch(4, "dx"))) or "")
    assert "majority of epoch 3" in (restarted.objection(proposal(epoch(4, "dx"), (old,), departed="c")) or "")
    founds = proposal(epoch(4, "dx", lineages=("d#4",), ended=("x#1",)), (old,), departed="abc")
    assert restarted.objection(founds) is None, "all are dead"
    assert restarted.objection(proposal(epoch(4, "abd"), (old,), departed="c")) is None
    told = Propose(Term(1, "d"), epoch(4, "dx", lineages=("d#4",), ended=("x#1",)), (old,), (), ("c",), ("a", "b"))
    assert restarted.objection(told) is None, "a person said so"


def test_what_is_recalled_is_never_entered_and_ends_with_the_first_epoch_of_its_own() -> None:
    old = epoch(3, "abc")
    restarted = Voter("d")
    restarted.recall([Votes(3, old)])
    assert restarted.commit(old.key) is None
    assert restarted.current is None
    restarted.accept(proposal(epoch(4, "abd"), (old,)))
    assert restarted.votes.doubts == (old, epoch(4, "abd")), "a gave up what it proposed to d, not what it was in"
    assert restarted.commit((4, "a")) == epoch(4, "abd")
    assert restarted.votes == Votes(4, epoch(4, "abd"))


def test_of_several_earlier_processes_only_what_nothing_followed_is_recalled() -> None:
    restarted = Voter("d")
    restarted.recall([Votes(3, epoch(3, "abc")), Votes(7, epoch(5, "abe"), (epoch(7, "abf", "b"),)), Votes(9)])
    assert restarted.votes == Votes(9, None, (epoch(5, "abe"), epoch(7, "abf", "b")))
    many = Voter("d")
    many.recall([Votes(n, epoch(n, "ab", lineages=(f"x#{n}",))) for n in range(1, 2 * MAX_DOUBTS)])
    assert len(many.votes.doubts) < MAX_DOUBTS
    assert many.votes.doubts[-1].number == 2 * MAX_DOUBTS - 1


def test_what_a_process_only_recalled_it_did_not_promise() -> None:
    recalled = Votes(3, None, (epoch(3, "abc"),))
    assert promised_by("d", recalled) == Votes(3)
    assert promised_by("c", recalled) == recalled
    assert is_binding(recalled)
    assert not is_binding(Votes(3, epoch(3, "d", lineages=())))


# --- places ----------------------------------------------------------------------------------------------------------


def places(before: str, after: str) -> str:
    old = Epoch(1, "a", tuple(Member(peer, joined=1) for peer in before), (), ("x#1",)) if before else None
    return "".join(member.peer for member in seat(old, {peer: Member(peer) for peer in after}, 2))


def test_members_keep_their_places_where_they_can() -> None:
    assert places("", "cab") == "abc"
    assert places("dcba", "abcd") == "dcba"
    assert places("abcd", "abcdx") == "abcdx"
    assert places("abcd", "acd") == "adc"
    assert places("abcd", "acdx") == "axcd"


@given(before=st.permutations(PEERS).map(lambda p: "".join(p[:5])), after=groups)
def test_everyone_has_one_place_and_nobody_moves_without_need(before: str, after: set[str]) -> None:
    found = places(before, "".join(after))
    assert sorted(found) == sorted(after)
    for peer in after & set(before):
        if before.index(peer) < len(after):
            assert found.index(peer) == before.index(peer)


def test_seniority_is_kept_and_newcomers_get_the_new_number() -> None:
    old = Epoch(5, "a", (Member("a", joined=2),), (), ("x#1",))
    assert [m.joined for m in seat(old, {"a": Member("a"), "b": Member("b")}, 6)] == [2, 6]
