"""When a leader proposes, and whom it takes for ready."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import replace

from ringfort.cluster.core.contacts import Contact
from ringfort.cluster.core.events import EpochStarted, Fence, Instruction, Notify, Persist, Send
from ringfort.cluster.core.peer import PeerCore
from ringfort.cluster.core.peer_messages import Epoch, Hello, Member, Report, RunState, Votes
from ringfort.cluster.core.proposer import MAX_FAILURES, Proposer
from ringfort.cluster.core.state import PeerState
from ringfort.config import AutoDiscoveryConfig

ME = "a.1"


def meet(state: PeerState, peer: str, link: int) -> None:
    contact = Contact(link, "", True, 0.0)
    state.contacts.links[link] = contact
    state.contacts.introduce(contact, Hello(Member(peer)))
    state.note(peer, Report(Votes(), sees=(ME,)))


def test_the_wait_after_failed_proposals_is_not_begun_again_by_a_change() -> None:
    """Members of an elastic run pause for a second at the end of a step to seat a new one. A leader whose earlier
    proposals have failed must make its proposal before that is over."""
    state = PeerState(Member(ME), AutoDiscoveryConfig(min_peers=0, settle=0.1), 0.0, lambda: 0)
    proposer = Proposer(state)
    meet(state, "b.1", 1)
    for _ in range(MAX_FAILURES):
        while proposer.step() is None:
            state.advance(state.now + 0.1)
        assert proposer.pending is not None
        proposer.rejected("b.1", proposer.pending.epoch.number, "no")
    failed = state.time
    state.advance(state.now + 0.4)
    assert proposer.step() is None
    meet(state, "c.1", 2)
    state.reports["b.1"] = Report(Votes(), sees=(ME, "c.1"))
    state.reports["c.1"] = Report(Votes(), sees=(ME, "b.1"))
    state.advance(state.now + 0.3)
    assert proposer.step() is None
    assert proposer.deadline <= failed + 0.8 + 1e-9
    state.advance(state.now + 0.11)
    proposal = proposer.step()
    assert proposal is not None
    assert set(proposal.epoch.peers) == {ME, "b.1", "c.1"}


@pytest.mark.parametrize("old", [(ME,), (ME, "b.1")])
def test_a_leader_waits_for_members_to_hear_of_a_commit(old: tuple[str, ...]) -> None:
    """A new member that has not heard of it looks like a learner: on a slow link it would be left out again, or the
    leader would take itself for one that has no majority."""
    state = PeerState(Member(ME), AutoDiscoveryConfig(min_peers=0), 0.0, lambda: 0)
    proposer, here = Proposer(state), RunState(b"mark", "l", 7, is_ready=True)
    before = Epoch(1, ME, tuple(map(Member, old)), (), ("l",))
    peers = (*old, "c.1")
    state.run_state, state.voter.current, state.voter.votes = here, before, Votes(1, before)
    learner = replace(here, is_learner=True)
    for link, peer in enumerate(peers[1:]):
        meet(state, peer, link)
        sees = tuple(other for other in peers if other != peer)
        is_new = peer not in old
        votes = Votes(1, None, (before,), 1) if is_new else Votes(1, before)
        state.note(peer, Report(votes, 0 if is_new else 1, sees, state=learner if is_new else here))
    while (proposal := proposer.step()) is None:
        state.advance(state.now + 0.01)
    epoch = proposal.epoch
    assert set(epoch.peers) == {*peers}
    state.voter.accept(proposal)
    for peer in peers[1:]:
        report = state.reports[peer]
        state.note(peer, replace(report, current=0, votes=replace(report.votes, highest=2, doubts=(epoch,))))
    assert [proposer.accepted(state.time, peer, epoch.number) for peer in peers][-1] == epoch
    state.voter.commit(epoch.key)
    state.run_state = replace(here, is_ready=False)
    for peer in old[1:]:
        state.note(peer, replace(state.reports[peer], current=epoch.number, votes=Votes(2, epoch)))
    for _ in range(9):
        state.advance(state.now + 0.1)
        assert proposer.step() is None
        assert not proposer.is_stuck
    state.note("c.1", replace(state.reports["c.1"], current=epoch.number, votes=Votes(2, epoch, (), 1), state=here))
    state.advance(state.now + 0.3)
    assert proposer.step() is None
    assert not proposer.is_stuck
    assert proposer.deadline == inf


def is_ready(core: PeerCore, now: float, link: int) -> bool:
    """Return whether a peer that connects is told that the program is ready."""
    sent = [one.message for one in core.connected(now, link, "b", initiated=True) if isinstance(one, Send)]
    (state,) = [message.state for message in sent if isinstance(message, Report)]
    assert state is not None
    return state.is_ready


def test_a_learner_stays_ready_when_an_epoch_that_it_was_fenced_for_fails() -> None:
    core = PeerCore(Member(ME), AutoDiscoveryConfig(min_peers=0), 0.0)
    core.set_run_state(0.1, RunState(b"mark", "l", 7, is_ready=True))
    core.fenced(0.2, 5, RunState(b"mark", "l", 7))
    assert is_ready(core, 0.3, 1)
    core.fenced(0.4, 6, RunState(b"other", "l", 8))
    assert not is_ready(core, 0.5, 2)


def test_a_member_is_not_ready_any_more_when_an_epoch_begins() -> None:
    core = PeerCore(Member(ME), AutoDiscoveryConfig(min_peers=0), 0.0)
    todo, now, has_started = core.set_run_state(0.1, RunState(is_ready=True)), 0.1, False
    while not has_started:
        now += 0.1
        assert now < 10
        done = list[Instruction]()
        for one in todo:
            match one:
                case Fence(epoch=number):
                    done += core.fenced(now, number, RunState())
                case Persist(votes=votes):
                    done += core.persisted(now, votes)
                case Notify(event=EpochStarted()):
                    has_started = True
                case _:
                    pass
        todo = done or core.tick(now)
    assert not is_ready(core, now, 1)
