"""`Epochs`: a peer's part in agreeing on epochs: it considers, accepts, commits and, as the leader, proposes. Pure.

What is lawful is in membership.py; what a leader proposes, and when, in proposing.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from ringfort.cluster.core.contacts import Contact, node_of
from ringfort.cluster.core.election import ElectionState
from ringfort.cluster.core.events import EpochStarted, Waiting
from ringfort.cluster.core.instructions import Persist
from ringfort.cluster.core.membership import unlawful
from ringfort.cluster.core.peer_links import Links
from ringfort.cluster.core.peer_messages import Accept, Commit, Epoch, Propose, Reject, Votes
from ringfort.cluster.core.proposer import Proposer, RingOrder, Situation
from ringfort.cluster.core.state import PeerState, ambiguous_names

DISCOVERY: Final = 3.0
"""How many times `settle` others may take to be found before a new process says that it waits for them."""


@dataclass(frozen=True)
class _Promise:
    """What is being written to the disk, and takes effect when it is there."""

    votes: Votes
    accepts: Propose | None = None
    commits: Epoch | None = None


class Epochs:
    """The part of a core that is in epochs. `lead` and `judge` are to be called after every change."""

    def __init__(self, state: PeerState, links: Links, ring_order: RingOrder | None) -> None:
        self._state = state
        self._links = links
        self._proposer = Proposer(state.me.peer, state.config, ring_order)
        self._told_waiting = ""
        self._writing: _Promise | None = None

    @property
    def deadline(self) -> float:
        """When something is due even if nothing happens, in the state's `time`."""
        return self._proposer.deadline if self._writing is None else inf

    # --- a member -----------------------------------------------------------------------------------------------------

    def consider(self, contact: Contact | None, proposal: Propose) -> None:
        """A proposal of the leader, or our own."""
        state = self._state
        leader = state.me.peer if contact is None else contact.peer
        epoch = proposal.epoch
        if epoch.leader != leader or proposal.term.candidate != leader:
            assert contact is not None
            self._links.refuse(contact, f"it proposes in the name of {epoch.leader}")
            return
        why = self._objection(leader, proposal)
        if why is not None:
            self._answer(leader, Reject(epoch.number, why[:256]))
            return
        if leader != state.me.peer:
            self._proposer.rest()  # the law: what we proposed ourselves, we never commit from now on
        self._write(_Promise(state.voter.accepting(proposal), accepts=proposal))

    def _write(self, promise: _Promise) -> None:
        """The law: a promise is on the disk before it takes effect. Until then this peer is where it was, and promises
        nothing else."""
        self._writing = promise
        self._state.out.append(Persist(promise.votes))

    def written(self, votes: Votes, why: str) -> None:
        """`votes` is on the disk; or it is not, for the reason `why`, and this peer has promised nothing."""
        promise = self._writing
        if promise is None or promise.votes is not votes:
            return
        self._writing = None
        if promise.accepts is not None:
            self._accept(promise.accepts, why)
        elif promise.commits is not None and why:
            self._proposer.give_up(self._state.time, why)
        elif promise.commits is not None:
            started = self._state.voter.commit(promise.commits.key)
            self._state.tell(promise.commits.peers, Commit(promise.commits.number))
            if started is not None:
                self._started(started)

    def _accept(self, proposal: Propose, why: str) -> None:
        state, epoch = self._state, proposal.epoch
        objection = why or self._objection(epoch.leader, proposal)  # the disk may have taken long
        if objection:
            self._answer(epoch.leader, Reject(epoch.number, objection[:256]))
            return
        state.end_epoch(state.voter.accept(proposal), f"{epoch} is to follow")
        self._answer(epoch.leader, Accept(epoch.number))

    def _objection(self, leader: str, proposal: Propose) -> str | None:
        state, wanted = self._state, set(proposal.epoch.peers)
        if self._writing is not None:
            return "my disk is slow: I am still writing down an earlier promise"
        if state.election.leader != leader:
            return f"I follow {state.election.leader}"
        why = state.voter.objection(proposal)
        if why is not None:
            return why
        unseen = wanted - state.reports.keys() - {state.me.peer}
        if unseen:
            return f"I do not see {min(unseen)}"
        if state.holds and self._is_whole() and wanted > set(state.voter.current.peers if state.voter.current else ()):
            return "I hold: newcomers must wait"  # the leader may have proposed before it knew
        return None

    def _is_whole(self) -> bool:
        """Whether this peer is in an epoch and no member has left it for a later one. One that has will not come back:
        to hold the rest of the epoch together would keep all of them waiting."""
        state, current = self._state, self._state.voter.current
        others = () if current is None else (peer for peer in current.peers if peer in state.reports)
        return current is not None and all(state.reports[p].votes.highest <= current.number for p in others)

    def _answer(self, leader: str, message: Accept | Reject) -> None:
        state = self._state
        state.tell_report()
        contact = state.contacts.get(leader)
        if contact is not None:
            state.send(contact.link, message)
        elif leader == state.me.peer and isinstance(message, Accept):
            self.accepted(leader, message.number)
        elif leader == state.me.peer and isinstance(message, Reject):
            self.rejected(leader, message.number, message.why)

    def committed(self, contact: Contact, number: int) -> None:
        """The peer of `contact` says that all have accepted what it proposed."""
        if number > self._state.voter.votes.highest:
            self._links.refuse(contact, f"it commits epoch {number}, which we never accepted")
            return
        self.start((number, contact.peer))

    def start(self, key: tuple[int, str]) -> None:
        """The epoch of `key` is committed, and this peer in it, unless it has gone on since."""
        state = self._state
        epoch = state.voter.commit(key)
        if epoch is not None:
            self._started(epoch)

    def _started(self, epoch: Epoch) -> None:
        self._proposer.started(epoch)
        self._state.notify(EpochStarted(epoch))
        self.judge()  # somebody may have been lost since it was accepted

    def judge(self) -> None:
        """An epoch is over for a member that has lost another, or that may not go on."""
        state = self._state
        known = {state.me.peer, *state.reports}
        missing = set(state.voter.current.peers) - known if state.voter.current else set[str]()
        state.is_stuck = not state.voter.companions() <= known and bool(self._unlawful(known))
        if missing or state.is_stuck:
            state.end_epoch(state.voter.leave(), f"contact with {', '.join(sorted(missing))} is lost")

    def _unlawful(self, known: set[str]) -> list[Epoch]:
        """What this peer must not go on without the majority of, and has not."""
        state = self._state
        return unlawful(known, state.voter.votes, state.departed, state.without, state.config.on_partition)

    def _why_stuck(self) -> str:
        """For whom this peer waits, in words."""
        state = self._state
        known = {state.me.peer, *state.reports}
        ours, earlier = set[str](), set[str]()
        records = self._unlawful(known)
        shared = ambiguous_names(member for record in records for member in record.members)
        for record in records:
            lost = [m for m in record.members if m.peer not in known and m.peer not in state.dead]
            names = {f"{m.name} ({node_of(m.peer)})" if m.name in shared else m.name or m.peer for m in lost}
            (ours if state.me.peer in record.peers else earlier).update(names)
        if ours:
            return f"too few of the last epoch are in sight; they may be at work elsewhere. Missing: {_listed(ours)}"
        if not earlier or state.time < DISCOVERY * state.config.settle:
            return ""
        which = "; several machines share that name: use the id in brackets" if shared else ""
        return (
            f"an earlier process of this machine was in a group with {_listed(earlier)}, which may still be at work. "
            "Start the program there too; for one that is gone for good, start this one with --restart-without NAME "
            f"(RINGFORT_RESTART_WITHOUT){which}"
        )

    # --- the leader ---------------------------------------------------------------------------------------------------

    def lead(self) -> None:
        """The leader's turn; and everybody tells the program what it waits for."""
        state = self._state
        why = self._why_stuck() if state.is_stuck else ""
        if state.election.state is not ElectionState.MASTER:
            self._proposer.rest()
        elif self._writing is None:
            why = self._propose() or why
        if why != self._told_waiting:
            self._told_waiting = why
            if why:
                state.notify(Waiting(why))

    def _propose(self) -> str:
        """Returns what the leader waits for."""
        state, me = self._state, self._state.me
        situation = Situation(
            state.election.term,
            state.voter.current,
            state.voter.votes,
            {**state.reports, me.peer: state.own_report()},
            {me.peer: me, **{c.peer: c.hello.member for c in state.contacts if c.hello is not None}},
            state.departed,
            state.without,
        )
        proposal = self._proposer.step(state.time, situation)
        if self._proposer.is_stuck and any(not report.stuck for report in state.reports.values()):
            state.election.step_down(state.time)
            state.tell_election()
        if proposal is not None:
            state.tell(proposal.epoch.peers, proposal)
            self.consider(None, proposal)
        return self._proposer.why

    def accepted(self, peer: str, number: int) -> None:
        """`peer` accepts what we proposed; the last one commits it."""
        state = self._state
        epoch = self._proposer.accepted(state.time, peer, number)
        if epoch is not None:
            self._write(_Promise(state.voter.committing(epoch.key), commits=epoch))

    def rejected(self, peer: str, number: int, why: str) -> None:
        """`peer` does not accept what we proposed."""
        self._proposer.rejected(self._state.time, peer, number, why)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
