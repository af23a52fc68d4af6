"""A peer's core: given these events, expect these instructions."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ringfort.cluster.core.contacts import BURST
from ringfort.cluster.core.events import (
    CloneFound,
    Close,
    ClusterEvent,
    EpochEnded,
    EpochStarted,
    Fence,
    Instruction,
    Learn,
    Misbehaved,
    Notify,
    PeerJoined,
    PeerLost,
    Persist,
    Send,
    Waiting,
)
from ringfort.cluster.core.health import HealthEvent, HealthStatus
from ringfort.cluster.core.peer import PeerCore
from ringfort.cluster.core.peer_messages import (
    Accept,
    AnyMessage,
    Beat,
    Campaign,
    Commit,
    Departed,
    ElectionVote,
    Epoch,
    Hangup,
    Hello,
    Introduce,
    Lead,
    Member,
    Propose,
    Reject,
    Report,
    Retire,
    RunState,
    Term,
    Votes,
)
from ringfort.config import AutoDiscoveryConfig
from ringfort.errors import InvalidArgumentError
from tests.helpers.elastic_network import World

LINE = ("n0.a#1",)


def events(out: list[Instruction]) -> list[ClusterEvent]:
    return [i.event for i in out if isinstance(i, Notify)]


def sent(out: list[Instruction], link: int) -> list[AnyMessage]:
    return [i.message for i in out if isinstance(i, Send) and i.link == link]


def closed(out: list[Instruction]) -> list[int]:
    return [i.link for i in out if isinstance(i, Close)]


class Bench:
    """The core of `n1.b` and a hand that plays the others."""

    def __init__(self, config: AutoDiscoveryConfig | None = None) -> None:
        self.now = 100.0
        self.writes = True
        self.core = PeerCore(Member("n1.b", "host1"), config or AutoDiscoveryConfig(), self.now)
        self.out: list[Instruction] = []

    def do(self, out: list[Instruction]) -> list[Instruction]:
        """Carries out what concerns the disk, at once, unless a test does it."""
        self.out += out
        for instruction in [i for i in out if isinstance(i, Persist)] if self.writes else []:
            out = out + self.do(self.core.persisted(self.now, instruction.votes))
        return out

    def say(self, link: int, *messages: AnyMessage) -> list[Instruction]:
        out: list[Instruction] = []
        for message in messages:
            out += self.do(self.core.received(self.now, link, message))
        return out

    def meet(self, link: int, peer: str, *, initiated: bool = False, host: str = "") -> list[Instruction]:
        node = peer.rpartition(".")[0]
        out = self.do(self.core.connected(self.now, link, node, initiated=initiated))
        return out + self.say(link, Hello(Member(peer, host or f"host-{node}")), Report(Votes()))

    def wait(self, seconds: float, *beating: int) -> list[Instruction]:
        """Time passes; the peers on the links `beating` answer every heartbeat at once."""
        out: list[Instruction] = []
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            out += self.do(self.core.tick(self.now))
            for link in beating:
                out += self.say(link, Beat(self.now, self.now))
        return out

    def in_epoch(self) -> Epoch:
        """n1.b follows n0.a on link 1 and is with it and n2.c, on link 2, in epoch 3."""
        self.meet(1, "n0.a")
        self.meet(2, "n2.c")
        epoch = Epoch(3, "n0.a", (Member("n0.a"), Member("n1.b", "host1"), Member("n2.c")), (), LINE)
        both = ("n0.a", "n1.b", "n2.c")
        self.say(1, Lead(Term(1, "n0.a")), Propose(Term(1, "n0.a"), epoch), Commit(3))
        for link, peer in ((1, "n0.a"), (2, "n2.c")):
            self.say(link, Report(Votes(3, epoch), 3, tuple(p for p in both if p != peer)), Beat(1.0, self.now))
        assert self.core.epoch == epoch
        return epoch


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- meeting ----------------------------------------------------------------------------------------------------------


def test_a_link_opens_with_a_hello_and_a_report_each_way(bench: Bench) -> None:
    out = bench.core.connected(bench.now, 1, "n0", initiated=True)
    assert [type(m) for m in sent(out, 1)] == [Hello, Report]
    out = bench.say(1, Hello(Member("n0.a"), "desk"), Report(Votes()))
    assert PeerJoined("n0.a", "desk") in events(out)
    assert bench.core.sees == ("n0.a",)


def test_who_claims_another_identity_than_it_proved_is_refused(bench: Bench) -> None:
    bench.core.connected(bench.now, 1, "n0", initiated=False)
    out = bench.say(1, Hello(Member("n5.a")))
    assert isinstance(events(out)[0], Misbehaved)
    assert closed(out) == [1]


def test_who_does_not_say_who_it_is_is_refused(bench: Bench) -> None:
    bench.core.connected(bench.now, 1, "n0", initiated=False)
    assert closed(bench.say(1, Commit(1))) == [1]
    bench.core.connected(bench.now, 2, "n0", initiated=False)
    assert closed(bench.wait(3.0)) == [2]


def test_of_two_links_the_one_that_the_lower_id_dialled_stays(bench: Bench) -> None:
    bench.meet(1, "n0.a", initiated=True)
    assert closed(bench.meet(2, "n0.a", initiated=False)) == [1]
    bench.meet(3, "n2.c", initiated=True)
    assert closed(bench.meet(4, "n2.c", initiated=False)) == [4]
    assert not any(isinstance(event, PeerLost) for event in events(bench.out))


def test_on_the_link_that_stays_everything_is_said_again(bench: Bench) -> None:
    """What was said on the other link is not heard once this one is in use."""
    bench.do(bench.core.vouch(bench.now, "n1.x", Votes()))
    bench.wait(1.0)
    bench.meet(1, "n2.c", initiated=False)
    assert bench.core.leader == "n1.b"
    out = bench.meet(2, "n2.c", initiated=True)
    assert closed(out) == [1]
    assert [type(m) for m in sent(out, 2) if isinstance(m, (Lead, Departed))] == [Lead, Departed]


def test_one_that_does_not_say_again_that_it_leads_is_followed_no_more(bench: Bench) -> None:
    """It may have said on the other link that it does not, when that link was no longer listened to."""
    bench.meet(1, "n0.a", initiated=True)
    bench.say(1, Lead(Term(1, "n0.a")))
    assert bench.core.leader == "n0.a"
    assert closed(bench.meet(2, "n0.a", initiated=False)) == [1]
    assert bench.core.leader is None
    bench.say(2, Lead(Term(1, "n0.a")))
    assert bench.core.leader == "n0.a"


def test_a_goodbye_counts_on_whichever_link_it_comes(bench: Bench) -> None:
    bench.in_epoch()
    bench.do(bench.core.connected(bench.now, 5, "n2", initiated=True))
    bench.say(5, Hello(Member("n2.c", "host-n2")))
    assert bench.core.contacts.get("n2.c") is bench.core.contacts.links[5]
    bench.do(bench.core.connected(bench.now, 6, "n2", initiated=True))
    bench.say(6, Hello(Member("n2.d", "host-n2")), Departed("n2.c", Votes(3)))
    assert "n2.c" not in bench.core.sees


def test_a_newer_link_that_ends_before_its_first_report_is_a_loss(bench: Bench) -> None:
    bench.in_epoch()
    bench.do(bench.core.connected(bench.now, 3, "n2", initiated=False))
    bench.say(3, Hello(Member("n2.c", "host-n2")))
    out = bench.do(bench.core.closed(bench.now, 3))
    assert any(isinstance(event, PeerLost) for event in events(out))
    assert bench.core.epoch is None


def test_of_two_links_that_one_side_dialled_the_newer_stays(bench: Bench) -> None:
    bench.meet(1, "n0.a")
    assert closed(bench.meet(2, "n0.a")) == [1]


def test_an_epoch_goes_on_when_a_member_comes_by_another_link(bench: Bench) -> None:
    epoch = bench.in_epoch()
    bench.out.clear()
    bench.do(bench.core.connected(bench.now, 5, "n0", initiated=False))
    assert closed(bench.say(5, Hello(Member("n0.a", "host-n0")))) == [1]
    assert bench.core.epoch == epoch
    bench.say(5, Report(Votes(3, epoch), 3, ("n1.b", "n2.c")), Beat(1.0, bench.now))
    assert bench.core.epoch == epoch
    assert not [event for event in events(bench.out) if isinstance(event, (PeerJoined, PeerLost, EpochEnded))]


def test_a_call_to_oneself_is_ended_without_a_word(bench: Bench) -> None:
    bench.core.connected(bench.now, 1, "n1", initiated=True)
    out = bench.say(1, Hello(Member("n1.b", "host1")))
    assert (closed(out), events(out)) == ([1], [])


def test_processes_of_one_machine_are_peers_and_the_same_key_elsewhere_is_a_clone(bench: Bench) -> None:
    bench.meet(1, "n1.other", host="host1")
    assert bench.core.sees == ("n1.other",)
    out = bench.meet(2, "n1.third", host="host9")
    assert CloneFound("n1.third", "host1", "host9") in events(out)
    assert closed(out) == [2]


def test_whoever_knows_two_peers_introduces_them(bench: Bench) -> None:
    bench.core.connected(bench.now, 1, "n0", initiated=True)
    bench.say(1, Hello(Member("n0.a", addresses=("10.0.0.1:1",))), Report(Votes()))
    bench.core.connected(bench.now, 2, "n2", initiated=True)
    out = bench.say(2, Hello(Member("n2.c", addresses=("10.0.0.2:1",))), Report(Votes()))
    assert Introduce("n2.c", ("10.0.0.2:1",)) in sent(out, 1)
    assert Introduce("n0.a", ("10.0.0.1:1",)) in sent(out, 2)
    assert Learn("n3.d", ("10.0.0.3:1",), "n0.a") in bench.say(1, Introduce("n3.d", ("10.0.0.3:1",)))


# --- being lost -------------------------------------------------------------------------------------------------------


def test_a_link_that_ends_is_a_lost_contact_and_no_death(bench: Bench) -> None:
    bench.in_epoch()
    out = bench.do(bench.core.closed(bench.now, 2, "connection reset"))
    assert [e for e in events(out) if isinstance(e, PeerLost)] == [PeerLost("n2.c", "connection reset", False)]
    assert next(m for m in sent(out, 1) if isinstance(m, Report)).current == 0


def test_a_link_that_is_closed_on_purpose_says_why(bench: Bench) -> None:
    bench.in_epoch()
    bench.say(2, Hangup("silent for 1.2 s"))
    out = bench.do(bench.core.closed(bench.now, 2))
    why = "it closed the link: silent for 1.2 s"
    assert [e for e in events(out) if isinstance(e, PeerLost)] == [PeerLost("n2.c", why, False)]


def test_every_link_that_the_core_closes_ends_with_a_hangup(bench: Bench) -> None:
    bench.in_epoch()
    out = bench.wait(1.5, 1)
    assert closed(out) == [2]
    assert isinstance(sent(out, 2)[-1], Hangup)


def test_a_silent_peer_is_lost_and_the_epoch_ends(bench: Bench) -> None:
    epoch = bench.in_epoch()
    out = bench.wait(1.5, 1)
    assert closed(out) == [2]
    assert [e.epoch for e in events(out) if isinstance(e, EpochEnded)] == [epoch]
    assert bench.core.epoch is None
    assert bench.core.sees == ("n0.a",)


def test_who_loses_sight_of_the_majority_waits_and_says_so(bench: Bench) -> None:
    bench.in_epoch()
    out = bench.wait(4.0)
    assert any(isinstance(event, Waiting) for event in events(out))
    assert not any(isinstance(event, EpochStarted) for event in events(out))
    assert bench.core.epoch is None


def test_with_all_links_reset_it_waits(bench: Bench) -> None:
    bench.in_epoch()
    for link in (1, 2):
        bench.do(bench.core.closed(bench.now, link))
    out = bench.wait(3.0)
    assert bench.core.epoch is None
    waits = [event.why for event in events(bench.out) if isinstance(event, Waiting)]
    assert waits == [
        "too few members of the last epoch are connected; the others may be at work elsewhere. Missing: n0.a, n2.c"
    ]
    assert not any(isinstance(event, EpochStarted) for event in events(out))


def test_a_peer_that_slept_does_not_find_the_others_silent(bench: Bench) -> None:
    bench.in_epoch()
    bench.now += 3600
    out = bench.do(bench.core.tick(bench.now))
    assert closed(out) == []


def test_a_goodbye_is_a_departure_and_nothing_is_waited_for(bench: Bench) -> None:
    epoch = bench.in_epoch()
    for link, peer in ((1, "n0.a"), (2, "n2.c")):
        bench.say(link, Departed(peer, Votes(3, epoch)))
    bench.wait(1.0)
    assert bench.core.epoch is not None
    assert bench.core.epoch.peers == ("n1.b",)


# --- starting again ---------------------------------------------------------------------------------------------------


OLD = Epoch(7, "n0.x", (Member("n0.x", name="desk"), Member("n1.x", name="shed"), Member("n2.x", name="den")), (), LINE)
"""What the last process of n1 was in; n1.b is the next."""


def restarted(*without: str) -> Bench:
    bench = Bench(AutoDiscoveryConfig(restart_without=without))
    bench.do(bench.core.vouch(bench.now, "n1.x", Votes(7, OLD)))
    bench.do(bench.core.recall(bench.now, [Votes(7, OLD)]))
    return bench


def waits(bench: Bench) -> list[str]:
    return [event.why for event in events(bench.out) if isinstance(event, Waiting)]


def test_a_process_that_starts_again_waits_for_the_others_and_says_for_whom() -> None:
    bench = restarted()
    assert Persist(Votes(7, None, (OLD,))) in bench.out
    bench.wait(1.0)
    assert waits(bench) == [], "they may only not have been found yet"
    bench.wait(4.0)
    assert len(waits(bench)) == 1
    assert "in a group with den, desk, which may still be at work" in waits(bench)[0]
    assert "--restart-without NAME" in waits(bench)[0]
    assert bench.core.epoch is None


@pytest.mark.parametrize("names", [("desk", "den"), ("n0.x", "n2.x"), ("n0", "den"), ("desk", "den", "attic")])
def test_a_person_may_say_who_is_gone_by_name_peer_or_node(names: tuple[str, ...]) -> None:
    bench = restarted(*names)
    bench.wait(2.0)
    assert bench.core.epoch is not None
    assert bench.core.epoch.peers == ("n1.b",)
    assert waits(bench) == []


def test_those_whose_machines_vouch_for_them_are_not_waited_for() -> None:
    bench = restarted("den")
    bench.meet(1, "n0.a")
    bench.say(1, Departed("n0.x", Votes(7, OLD)))
    bench.do(bench.core.closed(bench.now, 1))
    bench.wait(2.0)
    assert bench.core.epoch is not None


def test_an_observer_recalls_nothing() -> None:
    core = PeerCore(Member("n1.b", "host1", 0), AutoDiscoveryConfig(), 0.0)
    assert core.recall(0.0, [Votes(7, OLD)]) == []
    assert core.voter.votes == Votes()


def test_a_peer_may_hold_what_an_earlier_process_of_its_machine_was_in_but_not_what_others_were_in(
    bench: Bench,
) -> None:
    bench.core.connected(bench.now, 1, "n2", initiated=False)
    out = bench.say(1, Hello(Member("n2.c")), Report(Votes(7, None, (OLD,))))
    assert bench.core.sees == ("n2.c",)
    bench.core.connected(bench.now, 2, "n5", initiated=False)
    out = bench.say(2, Hello(Member("n5.z")), Report(Votes(7, None, (OLD,))))
    assert [e.why for e in events(out) if isinstance(e, Misbehaved)] == ["its report contradicts itself about epoch 7"]


def test_who_leaves_is_released_where_all_its_companions_are_there_to_hear_it() -> None:
    for seconds, died, released in ((0.0, False, True), (0.0, True, False), (1.2, False, False)):
        bench = Bench()
        bench.in_epoch()
        bench.now += seconds  # and nobody has answered since
        bench.core.leave(bench.now, died=died)
        assert bench.core.is_released is released
    bench = Bench()
    epoch = bench.in_epoch()
    bench.do(bench.core.closed(bench.now, 2))
    bench.core.leave(bench.now)
    assert not bench.core.is_released
    bench = Bench()
    bench.in_epoch()
    bench.say(2, Departed("n2.c", Votes(3, epoch)))
    bench.core.leave(bench.now)
    assert bench.core.is_released


# --- a busy program ---------------------------------------------------------------------------------------------------


def test_the_heartbeats_of_a_busy_program_say_so(bench: Bench) -> None:
    bench.meet(1, "n0.a")
    for busy in (True, False):
        bench.do(bench.core.set_busy(bench.now, busy))
        beats = [m for m in sent(bench.wait(0.5, 1), 1) if isinstance(m, Beat)]
        assert {beat.busy for beat in beats} == {busy}


def test_a_peer_whose_program_is_busy_is_degraded_at_once_and_stays_in_the_epoch(bench: Bench) -> None:
    epoch = bench.in_epoch()
    bench.wait(0.3, 1, 2)
    told: list[ClusterEvent] = []
    for _ in range(30):
        bench.wait(0.2, 2)
        told += events(bench.say(1, Beat(bench.now, bench.now, busy=True)))
    assert [(event.peer, event.status) for event in told if isinstance(event, HealthEvent)] == [
        ("n0.a", HealthStatus.DEGRADED)
    ]
    assert bench.core.epoch == epoch


# --- the epoch --------------------------------------------------------------------------------------------------------


def test_what_is_promised_is_written_down_before_it_is_sent(bench: Bench) -> None:
    bench.in_epoch()
    order = [
        type(i) if isinstance(i, Persist) else type(i.message) for i in bench.out if isinstance(i, (Persist, Send))
    ]
    assert order.index(Persist) < order.index(Accept)


def next_epoch(bench: Bench, peers: str, number: int = 4) -> Propose:
    names = {"a": "n0.a", "b": "n1.b", "c": "n2.c"}
    members = tuple(Member(names[p], "host1" if p == "b" else "") for p in peers)
    formed = bench.core.voter.votes.formed
    assert formed is not None
    return Propose(Term(1, "n0.a"), Epoch(number, "n0.a", members, (), LINE), (formed,))


def test_a_member_that_is_lost_is_left_out_at_once(bench: Bench) -> None:
    bench.in_epoch()
    assert Accept(4) in sent(bench.say(1, next_epoch(bench, "ab")), 1)


def test_only_the_leader_one_follows_is_heard(bench: Bench) -> None:
    epoch = bench.in_epoch()
    theirs = Epoch(4, "n2.c", epoch.members, (), LINE)
    out = bench.say(2, Propose(Term(9, "n2.c"), theirs, (epoch,)))
    assert [m.why for m in sent(out, 2) if isinstance(m, Reject)] == ["I follow n0.a"]


def test_a_member_out_of_sight_is_reported_in_place_of_an_acceptance(bench: Bench) -> None:
    bench.in_epoch()
    proposal = next_epoch(bench, "abc")
    bench.do(bench.core.closed(bench.now, 2))
    assert [m.why for m in sent(bench.say(1, proposal), 1) if isinstance(m, Reject)] == ["I do not see n2.c"]


def test_a_commit_that_the_leader_could_not_send_is_learned_from_another_member(bench: Bench) -> None:
    bench.in_epoch()
    proposal = next_epoch(bench, "abc")
    bench.say(1, proposal)
    assert bench.core.epoch is None
    bench.say(2, Report(Votes(4, proposal.epoch), 4, ("n0.a", "n1.b")))
    assert bench.core.epoch == proposal.epoch


def test_an_epoch_ends_when_a_member_is_in_a_later_one(bench: Bench) -> None:
    """The others took this peer for lost, and went on; it has contact with them again, and would wait for them in the
    old epoch."""
    bench.in_epoch()
    later = Epoch(4, "n0.a", (Member("n0.a"), Member("n2.c")), (), LINE)
    bench.say(2, Report(Votes(4, later), 4, ("n0.a", "n1.b")))
    assert bench.core.epoch is None


def test_a_member_holds_only_while_nobody_has_left_the_epoch_for_a_later_one(bench: Bench) -> None:
    """n2.c accepts epoch 4, which lets a newcomer in, before it hears that n1.b holds. It is in no epoch then, and
    would wait for one for as long as n1.b holds."""
    epoch = bench.in_epoch()
    bench.meet(3, "n3.d")
    bench.do(bench.core.hold(bench.now, True))
    larger = (*epoch.members, Member("n3.d"))
    offers = [Propose(Term(1, "n0.a"), Epoch(n, "n0.a", larger, (), LINE), (epoch,)) for n in (4, 5)]
    assert Reject(4, "I hold the epoch: new peers must wait") in sent(bench.say(1, offers[0]), 1)
    bench.say(2, Report(Votes(4, epoch, (offers[0].epoch,)), 0, ("n0.a", "n1.b", "n3.d")))
    assert Accept(5) in sent(bench.say(1, offers[1]), 1)


def test_newcomers_wait_while_a_member_holds() -> None:
    bench = Bench(AutoDiscoveryConfig(settle=0.2))
    bench.wait(1.0)
    assert bench.core.epoch is not None
    bench.do(bench.core.hold(bench.now, True))
    bench.meet(1, "n5.z")
    bench.say(1, ElectionVote(bench.core.election.term, True), Report(Votes(), 0, ("n1.b",)))
    assert not any(isinstance(m, Propose) for m in sent(bench.wait(2.0, 1), 1))
    bench.do(bench.core.hold(bench.now, False))
    assert any(isinstance(m, Propose) for m in sent(bench.wait(2.0, 1), 1))


def test_fewer_than_the_least_wait() -> None:
    bench = Bench(AutoDiscoveryConfig(min_peers=1))
    out = bench.wait(2.0)
    assert [e.why for e in events(out) if isinstance(e, Waiting)] == ["0 of at least 1 other peers are here"]
    assert bench.core.epoch is None


@pytest.mark.parametrize(("most", "members"), [(None, 2), (1, 2), (0, 1)])
def test_more_than_the_most_wait(most: int | None, members: int) -> None:
    bench = Bench(AutoDiscoveryConfig(max_peers=most))
    bench.meet(1, "n2.c")
    bench.wait(0.4, 1)
    bench.say(1, ElectionVote(bench.core.election.term, True), Report(Votes(), 0, ("n1.b",)))
    bench.wait(1.2, 1)
    [epoch] = {m.epoch for m in sent(bench.out, 1) if isinstance(m, Propose)} or {bench.core.epoch}
    assert len(epoch.members) == members


# --- liars and floods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [
        Commit(99),
        Report(Votes(9, Epoch(9, "n0.a", (Member("n0.a"),)))),
        Report(Votes(3), 3),
        Report(Votes(3, Epoch(3, "n0.a", (Member("n0.a"), Member("n2.c")), (), LINE)), 3),
        Report(Votes(2, Epoch(5, "n0.a", (Member("n2.c"),)))),
        Propose(Term(1, "n0.a"), Epoch(9, "n0.a", (Member("n1.b"), Member("n0.a")))),
        Propose(Term(1, "n2.c"), Epoch(9, "n0.a", (Member("n1.b"), Member("n2.c")))),
        Departed("n0.a", Votes()),
        Departed("n1.b", Votes()),
        Beat(1.0, 1e9),
        Hello(Member("n2.c")),
    ],
    ids=lambda lie: type(lie).__name__,
)
def test_a_liar_is_named_and_refused_and_the_others_go_on(bench: Bench, lie: AnyMessage) -> None:
    bench.in_epoch()
    out = bench.say(2, lie)
    assert [e.peer for e in events(out) if isinstance(e, Misbehaved)] == ["n2.c"]
    assert closed(out) == [2]
    assert bench.core.sees == ("n0.a",)
    assert closed(bench.meet(7, "n2.c")) == [7]  # and for a while it is not let in again


def test_what_cannot_be_read_is_refused(bench: Bench) -> None:
    bench.in_epoch()
    out = bench.core.garbled(bench.now, 2, "a control message cannot be read")
    assert Misbehaved("n2.c", "a control message cannot be read") in events(out)


def test_a_flood_is_cut_off(bench: Bench) -> None:
    bench.meet(1, "n0.a")
    out = bench.say(1, *[Campaign(Term(1, "x"))] * int(BURST + 1))
    assert [type(e) for e in events(out) if isinstance(e, Misbehaved)] == [Misbehaved]
    assert closed(out) == [1]
    assert bench.say(1, Commit(1)) == []


# --- the end ----------------------------------------------------------------------------------------------------------


def test_who_leaves_says_goodbye_with_its_promises_and_is_silent_from_then_on(bench: Bench) -> None:
    epoch = bench.in_epoch()
    out = bench.core.leave(bench.now, "lunch")
    assert sent(out, 1) == [Departed("n1.b", Votes(3, epoch), "lunch")]
    assert closed(out) == [1, 2]
    assert bench.core.tick(bench.now + 1) == []
    assert bench.core.connected(bench.now + 1, 9, "n0", initiated=False) == []


def test_one_vouches_for_ones_own_node_alone(bench: Bench) -> None:
    bench.meet(1, "n0.a")
    gone = Departed("n1.before", Votes(5), "its process has ended", died=True)
    assert gone in sent(bench.do(bench.core.vouch(bench.now, "n1.before", Votes(5))), 1)
    assert gone in sent(bench.meet(2, "n2.c"), 2)
    with pytest.raises(InvalidArgumentError, match="own node"):
        bench.core.vouch(bench.now, "n0.before", Votes())


def test_a_clock_that_goes_back_and_an_id_without_a_node_are_errors(bench: Bench) -> None:
    with pytest.raises(InvalidArgumentError, match="went back"):
        bench.core.tick(bench.now - 1)
    with pytest.raises(InvalidArgumentError, match=r"me\.peer"):
        PeerCore(Member("alone"), AutoDiscoveryConfig(), 0.0)


# --- epochs in which a program cannot continue ------------------------------------------------------------------------


def test_an_epoch_that_its_program_gives_up_has_ended_and_others_are_told_where_it_is(bench: Bench) -> None:
    epoch, stands = bench.in_epoch(), RunState(b"mark", LINE[0], 7)
    out = bench.core.give_up(bench.now, epoch.number, stands, "copies differ")
    assert events(out) == [EpochEnded(epoch, "copies differ")]
    assert bench.core.epoch is None
    told = [message for message in sent(out, 2) if isinstance(message, Report)]
    assert [(report.current, report.state) for report in told] == [(0, stands)]


def test_a_program_that_gives_up_an_earlier_epoch_stays_in_the_current_one(bench: Bench) -> None:
    epoch = bench.in_epoch()
    assert events(bench.core.give_up(bench.now, epoch.number - 1, RunState(), "copies differ")) == []
    assert bench.core.epoch == epoch


def test_a_leader_that_gives_an_epoch_up_proposes_the_next_one_to_the_same_members() -> None:
    world = World(3, 3)
    for host in range(3):
        world.start(host)
    world.network.run_until(5.0)
    assert world.network.agreed
    before = world.network.peers[0].core.epoch
    for program in world.living():
        program.end()
        world.call(program.peer, "give_up", before.number, program.run_state(), "copies differ")
    world.network.run_until(6.0)
    after = world.network.peers[0].core.epoch
    assert world.network.agreed
    assert after.number > before.number
    assert after.peers == before.peers


# --- leaders that cannot form an epoch --------------------------------------------------------------------------------


class TwoRuns:
    """`Bench` in an elastic run with n0.a, which has ended its turn as the leader. n2.c is in another run, with more
    steps: that one stays, so neither of these two can form an epoch."""

    def __init__(self, yields: int = 0) -> None:
        self.bench = Bench()
        self.last = self.bench.in_epoch()
        self.bench.do(self.bench.core.give_up(self.bench.now, 3, RunState(b"x", LINE[0], 7), "copies differ"))
        other = Epoch(1, "n2.c", (Member("n2.c"),), (), ("n2.c#1",))
        self.bench.say(2, Report(Votes(1, other), 1, ("n0.a", "n1.b"), state=RunState(b"y", "n2.c#1", 38)))
        self.ends_its_turn(yields)

    def ends_its_turn(self, yields: int) -> None:
        state = RunState(b"x", LINE[0], 7)
        self.bench.say(1, Retire(Term(1, "n0.a")))
        self.bench.say(1, Report(Votes(3, self.last), 0, ("n1.b", "n2.c"), yields=yields, state=state))

    def elect(self) -> int:
        """The others elect this peer. Return the place among those that step down which it reports then."""
        terms: list[Term] = []
        while not terms:
            terms = [message.term for message in sent(self.bench.wait(0.1, 1, 2), 1) if isinstance(message, Campaign)]
        (term,) = terms
        out = self.bench.say(1, ElectionVote(term, True)) + self.bench.say(2, ElectionVote(term, True))
        assert {Lead(term), Retire(term)} <= set(sent(out, 2))
        return [message for message in sent(out, 2) if isinstance(message, Report)][-1].yields


def test_one_that_steps_down_comes_after_those_that_did_so_before() -> None:
    assert TwoRuns(yields=4).elect() == 5


def test_two_leaders_that_cannot_form_an_epoch_let_a_third_one_lead() -> None:
    """They would elect each other again and again, because they were in a later epoch than the third."""
    runs = TwoRuns()
    assert runs.elect() == 1
    runs.bench.say(1, Lead(Term(8, "n0.a")))
    assert runs.bench.core.leader == "n0.a"
    runs.bench.say(1, Retire(Term(8, "n0.a")))
    runs.ends_its_turn(2)
    assert ElectionVote(Term(9, "n2.c"), True) in sent(runs.bench.say(2, Campaign(Term(9, "n2.c"))), 2)


def test_one_that_stepped_down_is_like_the_others_when_it_is_in_an_epoch_again() -> None:
    world = World(3, 3)
    world.damage = 0.0
    for host in range(3):
        world.start(host)
    world.network.run_until(5.0)
    before = world.network.peers[0].core.epoch
    first = next(peer for peer in world.network.alive if peer.core.leader == peer.id)
    world.call(first, "step_down")
    world.network.run_until(6.0)
    assert first.core.leader not in (None, first.id)
    assert first.core._state.yields > 0
    for program in world.living():
        program.end()
        world.call(program.peer, "give_up", before.number, program.run_state(), "copies differ")
    world.network.run_until(7.0)
    assert world.network.agreed
    assert first.core._state.yields == 0


# --- epochs that a program is fenced for, and that this peer does not accept ------------------------------------------


class Fenced:
    """`Bench` in an elastic run. n1.b has accepted epoch 4 of n0.a; it is not committed. n2.c leads since then."""

    def __init__(self) -> None:
        self.bench, self.here = Bench(), RunState(b"mark", LINE[0], 7)
        self.last = self.bench.in_epoch()
        self.bench.do(self.bench.core.set_run_state(self.bench.now, self.here))
        assert self.propose(1, 4) == [Fence(4, ())]
        assert Accept(4) in sent(self.fence(4), 1)
        self.bench.say(1, Retire(Term(1, "n0.a")))
        self.bench.say(2, Lead(Term(2, "n2.c")))

    def propose(self, link: int, number: int, at: RunState | None = None) -> list[Instruction]:
        """The peer on `link` proposes an epoch. Return what the program has to do."""
        leader = {1: "n0.a", 2: "n2.c"}[link]
        epoch = replace(self.last, number=number, leader=leader)
        out = self.bench.say(link, Propose(Term(link, leader), epoch, (self.last,), at=at))
        return [one for one in out if isinstance(one, Fence)]

    def fence(self, number: int) -> list[Instruction]:
        return self.bench.do(self.bench.core.fenced(self.bench.now, number, self.here))

    def takes_part_only_above(self, number: int) -> None:
        """Check that this peer is in no epoch up to `number`, accepts none, and says so."""
        self.bench.say(1, Commit(4))
        assert self.bench.core.epoch is None
        self.last = replace(self.last, number=4)
        reports = [message for message in sent(self.bench.out, 1) if isinstance(message, Report)]
        assert reports[-1].votes.highest == number
        assert not self.propose(2, number)
        assert self.propose(2, number + 1)


@pytest.mark.parametrize("number", [5, 9])
def test_a_program_that_is_fenced_for_an_epoch_and_not_in_it_takes_part_in_no_earlier_one(number: int) -> None:
    """The program would do nothing there but run into the fence, and the members would wait for it for ever."""
    fenced = Fenced()
    assert fenced.propose(2, number, at=RunState(b"elsewhere", LINE[0], 8))
    (answer,) = [message for message in sent(fenced.fence(number), 2) if isinstance(message, Reject)]
    assert "I am at step 7" in answer.why
    fenced.takes_part_only_above(number)


def test_a_lower_number_that_is_proposed_while_the_program_is_being_fenced_is_not_accepted() -> None:
    fenced = Fenced()
    assert fenced.propose(2, 9)
    assert fenced.propose(2, 6)
    fenced.fence(9)
    assert Accept(6) not in sent(fenced.fence(6), 2)
    fenced.takes_part_only_above(9)


def test_a_vote_that_cannot_be_written_leaves_the_program_in_no_earlier_epoch() -> None:
    fenced = Fenced()
    bench, bench.writes = fenced.bench, False
    assert fenced.propose(2, 6)
    (write,) = [one for one in fenced.fence(6) if isinstance(one, Persist)]
    bench.say(1, Commit(4))
    bench.writes = True
    out = bench.do(bench.core.persisted(bench.now, write.votes, "the disk is full"))
    assert Reject(6, "the disk is full") in sent(out, 2)
    fenced.takes_part_only_above(6)
