"""Elections: given who is in sight and what they say, who leads."""

from __future__ import annotations

from ringfort.cluster.core.election import LEADERLESS, Claim, ElectionEventKind, ElectionManager, ElectionState
from ringfort.cluster.core.peer_messages import Campaign, ElectionVote, Lead, Retire, Term
from ringfort.config import ElectionConfig


def claim(peer: str, *, stuck: bool = False, epoch: int = 0, joined: int = 0, work: int = 0) -> Claim:
    return Claim(stuck, 0, -epoch, joined, -work, peer)


def manager(me: str, *others: str) -> ElectionManager:
    made = ElectionManager(me, ElectionConfig(settle=0.3, timeout=0.5))
    made.observe(0.0, claim(me), {peer: claim(peer) for peer in others})
    return made


def others(*peers: str) -> dict[str, Claim]:
    return {peer: claim(peer) for peer in peers}


def test_a_peer_alone_leads_after_things_have_settled() -> None:
    a = manager("a")
    a.observe(0.29, claim("a"), {})
    assert a.state is ElectionState.IDLE
    assert a.deadline == 0.3
    a.observe(0.3, claim("a"), {})
    assert (a.state, a.leader) == (ElectionState.MASTER, "a")
    assert [e.kind for e in a.events] == [ElectionEventKind.STARTED, ElectionEventKind.ELECTED_MASTER]


def test_the_best_stands_first_and_the_next_a_timeout_later() -> None:
    assert manager("a", "b", "c").deadline == 0.3
    assert manager("c", "a", "b").deadline == 1.3


def test_claims_compare_stuck_then_epoch_then_seniority_then_work_then_id() -> None:
    order = [
        claim("z", epoch=5, joined=1, work=9),
        claim("b", epoch=5, joined=2, work=7),
        claim("a", epoch=5, joined=2, work=3),
        claim("c", epoch=5, joined=2, work=3),
        claim("d", epoch=4, joined=1),
        claim("e", stuck=True, epoch=9),
    ]
    shuffled = order[3:] + order[:3]
    assert sorted(shuffled) == order


def test_all_votes_make_a_leader_that_tells_all() -> None:
    a = manager("a", "b", "c")
    a.observe(0.3, claim("a"), others("b", "c"))
    assert a.outbox == [(None, Campaign(Term(1, "a")))]
    a.received(0.31, "b", ElectionVote(Term(1, "a"), True))
    assert a.state is ElectionState.CAMPAIGNING
    a.received(0.32, "c", ElectionVote(Term(1, "a"), True))
    assert a.state is ElectionState.MASTER
    assert a.outbox[-1] == (None, Lead(Term(1, "a")))


def test_a_vote_of_another_term_does_not_count() -> None:
    a = manager("a", "b")
    a.observe(0.3, claim("a"), others("b"))
    a.received(0.31, "b", ElectionVote(Term(7, "a"), True))
    assert a.state is ElectionState.CAMPAIGNING


def test_a_peer_votes_once_a_number() -> None:
    c = manager("c", "a", "b")
    c.received(0.1, "b", Campaign(Term(4, "b")))
    c.received(0.1, "a", Campaign(Term(4, "a")))
    assert [m for _, m in c.outbox] == [ElectionVote(Term(4, "b"), True), ElectionVote(Term(4, "a"), False)]


def test_a_better_candidate_refuses_and_stands_itself() -> None:
    a = manager("a", "b")
    a.received(0.1, "b", Campaign(Term(4, "b")))
    assert a.outbox == [("b", ElectionVote(Term(4, "b"), False)), (None, Campaign(Term(5, "a")))]
    b = manager("b", "a")
    b.force(0.1)
    b.received(0.1, "a", ElectionVote(b.term, False))
    assert b.state is ElectionState.IDLE


def test_a_follower_stays_with_its_leader_and_says_so() -> None:
    c = manager("c", "a", "b")
    c.received(0.1, "b", Lead(Term(2, "b")))
    assert (c.state, c.leader) == (ElectionState.FOLLOWER, "b")
    c.received(0.2, "a", Campaign(Term(9, "a")))
    assert c.outbox == [("a", ElectionVote(Term(9, "a"), False, "b"))]


def test_a_lead_in_the_name_of_another_is_ignored() -> None:
    c = manager("c", "a", "b")
    c.received(0.1, "b", Lead(Term(2, "a")))
    assert c.leader is None


def test_who_loses_sight_of_its_leader_stands_as_soon_as_the_others_have_heard_of_that() -> None:
    b = manager("b", "a")
    b.received(0.1, "a", Lead(Term(2, "a")))
    b.observe(5.0, claim("b"), {})
    assert (b.state, b.deadline) == (ElectionState.IDLE, 5.0 + LEADERLESS)
    b.observe(5.0 + LEADERLESS, claim("b"), {})
    assert (b.leader, b.term) == ("b", Term(3, "b"))


def test_of_several_that_lose_their_leader_the_next_candidate_waits_for_the_best() -> None:
    c = manager("c", "a", "b")
    c.received(0.1, "a", Lead(Term(2, "a")))
    c.observe(5.0, claim("c"), others("b"))
    assert c.deadline == 5.0 + LEADERLESS + 0.5


def test_a_silent_voter_is_waited_for_once_and_a_majority_is_then_enough() -> None:
    a = manager("a", "b", "c")
    a.observe(0.3, claim("a"), others("b", "c"))
    a.received(0.31, "b", ElectionVote(Term(1, "a"), True))
    a.observe(0.79, claim("a"), others("b", "c"))
    assert a.state is ElectionState.CAMPAIGNING
    a.observe(0.8, claim("a"), others("b", "c"))
    assert a.state is ElectionState.MASTER
    assert ElectionEventKind.TIMEOUT in [e.kind for e in a.events]


def test_with_too_few_votes_it_rests_and_tries_again_in_a_higher_term() -> None:
    a = manager("a", "b", "c")
    a.observe(0.3, claim("a"), others("b", "c"))
    a.observe(0.8, claim("a"), others("b", "c"))
    assert a.state is ElectionState.IDLE
    a.observe(1.1, claim("a"), others("b", "c"))
    assert a.term == Term(2, "a")


def test_of_two_leaders_that_meet_the_lesser_retires_and_both_tell() -> None:
    a, b = manager("a"), manager("b")
    for one in (a, b):
        one.observe(0.3, claim(one.me), {})
        one.events.clear()
        one.outbox.clear()
    a.observe(1.0, claim("a"), others("b"))
    b.observe(1.0, claim("b"), others("a"))
    a.received(1.0, "b", Lead(b.term))
    b.received(1.0, "a", Lead(a.term))
    assert (a.state, b.state, b.leader) == (ElectionState.MASTER, ElectionState.FOLLOWER, "a")
    assert (None, Retire(Term(1, "b"))) in b.outbox
    assert {e.kind for e in (*a.events, *b.events)} >= {ElectionEventKind.SPLIT_BRAIN, ElectionEventKind.NEW_MASTER}


def test_a_leader_that_retires_is_no_longer_followed() -> None:
    b = manager("b", "a")
    b.received(0.1, "a", Lead(Term(2, "a")))
    b.received(0.2, "a", Retire(Term(2, "a")))
    assert (b.state, b.leader) == (ElectionState.IDLE, None)


def test_a_leader_steps_down_and_lets_others_stand_first() -> None:
    a = manager("a")
    a.observe(0.3, claim("a"), {})
    a.step_down(1.0)
    assert a.outbox[-1] == (None, Retire(Term(1, "a")))
    assert (a.leader, a.deadline) == (None, 1.8)


def test_a_leader_that_forces_an_election_retires_first_so_that_all_can_vote() -> None:
    a = manager("a", "b")
    a.force(0.1)
    a.received(0.1, "b", ElectionVote(a.term, True))
    assert a.state is ElectionState.MASTER
    a.outbox.clear()
    a.force(1.0)
    assert a.outbox == [(None, Retire(Term(1, "a"))), (None, Campaign(Term(2, "a")))]


def test_who_forces_an_election_does_not_follow_the_leader_before_the_votes_are_counted() -> None:
    b = manager("b", "a", "c")
    b.received(0.1, "c", Lead(Term(1, "c")))
    b.force(0.2)
    b.observe(0.2, claim("b"), {"a": claim("a"), "c": claim("c")})
    assert b.state is ElectionState.CAMPAIGNING
    for peer in ("a", "c"):
        b.received(0.3, peer, ElectionVote(b.term, False, "c"))
    assert b.state is ElectionState.MASTER  # and c, whose claim is lesser, retires when it hears of it
    b.received(0.4, "a", Lead(Term(9, "a")))
    assert (b.state, b.leader) == (ElectionState.FOLLOWER, "a")


def test_a_leader_tells_whom_it_meets() -> None:
    a = manager("a")
    a.observe(0.3, claim("a"), {})
    a.met("b")
    assert a.outbox[-1] == ("b", Lead(Term(1, "a")))
