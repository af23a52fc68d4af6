"""Witnesses: members that vote and hold no state. The law, and how an elastic run uses it on a simulated network."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ringfort.cluster.core.membership import Voter, heritage, is_lawful, largest_lawful, seat
from ringfort.cluster.core.peer_messages import Epoch, Member, Propose, RunState, Term, Votes
from tests.helpers.elastic_network import World

NOBODY = ""
LINEAGE = "a#1"


def member(peer: str) -> Member:
    """Capital letters are witnesses."""
    return Member(peer, slots=0, witness=True) if peer.isupper() else Member(peer)


def epoch(number: int, peers: str, leader: str = "") -> Epoch:
    return Epoch(number, leader or peers[0], tuple(map(member, peers)), (), (LINEAGE,))


# --- the law --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "before", "dead", "lawful"),
    [
        ("aW", "abW", NOBODY, True),
        ("bW", "abW", NOBODY, True),  # the higher id too
        ("ab", "abW", NOBODY, True),  # the witness dies
        ("a", "abW", NOBODY, False),  # cut off alone, with the lower id
        ("W", "abW", NOBODY, False),
        ("cW", "abW", "b", False),  # half of those alive, but no holder
        ("a", "aW", NOBODY, True),  # a tie, which the holder wins
        ("W", "aW", NOBODY, False),
        ("VW", "aVW", NOBODY, False),  # more than half, but no holder
        ("bV", "abVW", NOBODY, False),  # a tie that the other holder wins
        ("aV", "abVW", NOBODY, True),
        ("bVW", "abVW", NOBODY, True),
        ("b", "abW", "aW", True),
    ],
)
def test_a_witness_counts_in_a_majority_and_never_wins_a_tie(group: str, before: str, dead: str, lawful: bool) -> None:
    assert is_lawful(group, epoch(1, before), dead, "majority") is lawful


def test_a_lineage_ends_with_its_last_holder_whatever_witnesses_are_left() -> None:
    assert is_lawful("cW", epoch(1, "abW"), "ab", "majority")
    assert heritage([epoch(1, "abW")], "cW", "ab") == ((), (LINEAGE,))
    assert heritage([epoch(1, "abW")], "aW", "b") == ((LINEAGE,), ())


peers = st.sets(st.sampled_from("abcdVW"))


@given(peers.filter(lambda found: any(map(str.islower, found))), peers, peers, peers)
def test_two_lawful_successors_share_a_member_and_each_has_a_holder(
    before: set[str], one: set[str], other: set[str], dead: set[str]
) -> None:
    record = epoch(1, "".join(sorted(before, key=lambda peer: (peer.isupper(), peer))))
    dead -= one | other
    if is_lawful(one, record, dead, "majority") and is_lawful(other, record, dead, "majority"):
        assert one & other & before or not set(record.holders) - dead
        assert set(record.holders) & one or not set(record.holders) - dead


def test_who_returns_to_a_witness_alone_waits_for_those_it_went_on_with() -> None:
    before, after = epoch(1, "abW"), epoch(2, "aW")
    votes = {"b": Votes(1, before), "W": Votes(2, after)}
    assert largest_lawful("bW", votes, {}, (), "majority")[0] == []
    # Its machine says that `a` has ended: what it did is lost, and a new lineage begins.
    group, basis = largest_lawful("bW", votes, {"a": Votes(2, after)}, (), "majority")
    assert (group, basis.formed, heritage(basis.formed, group, "a")) == (["b", "W"], (after,), ((), (LINEAGE,)))


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (epoch(2, "aWb"), "its witnesses are not its last members"),
        (epoch(2, "abW", leader="W"), "its members do not include the leader"),
        (epoch(2, "acW"), "it lacks the majority of epoch 1"),
    ],
)
def test_a_member_refuses_what_gives_a_witness_too_much(new: Epoch, why: str) -> None:
    voter = Voter("a", votes=Votes(1, epoch(1, "abde")))
    assert (voter.objection(Propose(Term(1, new.leader), new, (epoch(1, "abde"),))) or "").startswith(why)


def test_an_epoch_that_adds_only_witnesses_may_begin_at_any_step() -> None:
    voter, state = Voter("a", votes=Votes(1, epoch(1, "ab"))), RunState(b"mark", LINEAGE, 7, is_pending=True)
    assert voter.state_objection(Propose(Term(1, "a"), epoch(2, "abW")), state) is None
    assert voter.state_objection(Propose(Term(1, "a"), epoch(2, "aW")), state) is None
    assert voter.state_objection(Propose(Term(1, "a"), epoch(2, "acW")), state)
    assert epoch(2, "abW").world_size == 2


def test_witnesses_have_the_last_places() -> None:
    before = epoch(3, "abcW")
    after = seat(before, {peer: member(peer) for peer in "WVbcd"}, 4)
    assert "".join(m.peer for m in after) == "dbcVW"
    assert [m.joined for m in after] == [4, 0, 0, 4, 0]


# --- a run ----------------------------------------------------------------------------------------------------------

WITNESS = 2


def begun(*, traced: bool = False) -> World:
    """Return a run of hosts 0 and 1 with a witness on host 2."""
    world = World(1, 3, witnesses=1, traced=traced)
    for host in range(3):
        world.start(host)
    world.network.run_until(3.0)
    assert world.network.agreed
    assert world.network.peers[WITNESS].core.leader != world.network.peers[WITNESS].id
    return world


def steps(world: World) -> list[int]:
    """Return how far hosts 0 and 1 are."""
    at = {program.peer.host: program.replica.mark.step for program in world.living()}
    return [at[host] for host in sorted(at)]


def members(world: World, host: int) -> list[int]:
    """Return the hosts in the epoch of the peer on `host`."""
    found = world.network.peers[host].core.epoch
    by_id = {peer.id: host for host, peer in world.network.peers.items()}
    return [] if found is None else [by_id[peer] for peer in found.peers]


@pytest.mark.parametrize("lost", [0, 1])
def test_of_two_machines_the_one_with_the_witness_goes_on(lost: int) -> None:
    world, other = begun(), 1 - lost
    world.network.partition([lost])
    world.network.run_until(16.0)
    assert (members(world, lost), members(world, other)) == ([], [other, WITNESS])
    before = steps(world)
    world.network.run_until(18.0)
    after = steps(world)
    assert (after[lost] - before[lost], after[other] > before[other]) == (0, True)
    world.network.heal()  # the other one copies the state and is seated again
    world.network.run_until(30.0)
    assert world.network.agreed


def test_a_witness_alone_does_nothing_and_two_go_on_without_it() -> None:
    world = begun()
    world.network.partition([WITNESS])
    world.network.run_until(16.0)
    assert (members(world, WITNESS), sorted(members(world, 0))) == ([], [0, 1])
    before = steps(world)
    for host in (0, 1):
        world.network.power_off(host)
    world.network.heal()
    world.network.run_until(30.0)
    assert (members(world, WITNESS), min(before) > 0) == ([], True)


def test_a_witness_that_comes_late_is_seated_between_two_messages_of_a_step() -> None:
    world = World(1, 3, witnesses=1)
    for host in (0, 1):
        world.start(host)
    world.network.run_until(3.0)
    before = steps(world)
    world.start(WITNESS)
    world.network.run_until(5.0)
    assert world.network.agreed
    assert all(now > then for now, then in zip(steps(world), before, strict=True))


def test_a_witness_does_not_help_one_machine_to_repeat_the_steps_of_the_other() -> None:
    world = begun()
    world.network.partition([1])
    world.network.run_until(15.0)
    assert members(world, 0) == [0, WITNESS]
    world.network.heal()
    world.network.partition([0])  # alone it wins the tie with the witness, as the holder
    world.network.run_until(30.0)
    assert (members(world, 0), members(world, 1), members(world, WITNESS)) == ([0], [], [])


def test_a_witness_that_starts_again_keeps_its_votes() -> None:
    world = begun()
    world.network.partition([1])
    world.network.run_until(16.0)
    went_on = world.network.peers[0].core.epoch
    world.network.power_off(0)  # with steps that nobody else has
    world.network.kill(WITNESS, word=False)
    world.start(WITNESS)
    world.network.heal()
    world.network.run_until(30.0)
    witness = world.network.peers[WITNESS].core
    assert went_on in witness.voter.votes.doubts
    assert (members(world, 1), members(world, WITNESS)) == ([], [])
