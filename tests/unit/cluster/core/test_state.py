"""Whom a person's `restart_without` stands for, and what a peer says of itself."""

from __future__ import annotations

import pytest

from ringfort.cluster.core.peer_messages import Epoch, Member, RunState, Votes
from ringfort.cluster.core.state import PeerState
from ringfort.config import AutoDiscoveryConfig
from tests.helpers.elastic_network import Program, World

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


# --- founders of elastic runs -----------------------------------------------------------------------------------------


class _Busy(World):
    """The program on host `busy` is in a call when its epoch ends, so it tells nothing unless it is fenced."""

    busy = 0

    def end(self, program: Program, epoch: Epoch) -> None:
        if program.peer.host != self.busy:
            super().end(program, epoch)


@pytest.mark.parametrize("busy", range(3))
@pytest.mark.parametrize("lost", range(3))
def test_a_founder_that_has_told_nothing_since_the_founding_stays_a_member_when_another_is_lost(
    busy: int, lost: int
) -> None:
    world = _Busy(1, 3)
    world.busy = busy
    for host in range(3):
        world.start(host)
    world.network.run_until(2.0)
    assert world.network.agreed
    before = {peer.core.epoch.number for peer in world.network.peers.values()}
    world.network.kill(lost)
    rest = [peer for host, peer in world.network.peers.items() if host != lost]
    while not (after := [peer.core.epoch for peer in rest if peer.core.epoch and peer.core.epoch.number not in before]):
        world.network.run_until(world.network.now + 0.01)
        assert world.network.now < 10.0
    assert {frozenset(epoch.peers) for epoch in after} == {frozenset(peer.id for peer in rest)}
