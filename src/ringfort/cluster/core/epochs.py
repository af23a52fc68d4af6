"""`Epochs`: a peer's part in agreeing on epochs: it answers proposals, commits and, as the leader, proposes. Pure.

membership.py has the rules; proposer.py decides what a leader proposes, and when.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final

from msgspec.structs import replace

from ringfort.cluster.core.contacts import Contact, node_of
from ringfort.cluster.core.election import ElectionState
from ringfort.cluster.core.events import EpochStarted, Fence, Persist, Waiting
from ringfort.cluster.core.membership import unlawful
from ringfort.cluster.core.peer_links import Links
from ringfort.cluster.core.peer_messages import Accept, Commit, Epoch, Propose, Reject, RunState, Votes
from ringfort.cluster.core.proposer import Proposer, RingOrder
from ringfort.cluster.core.state import PeerState, ambiguous_names

DISCOVERY: Final = 3.0
"""Multiples of `settle` that discovery may take before a new process says which peers it waits for."""

_COPIED: Final = "this peer has copied another state meanwhile"


class Epochs:
    """The part of a core that takes part in epochs. Call `lead` and `check_current` after every change."""

    def __init__(self, state: PeerState, links: Links, ring_order: RingOrder | None) -> None:
        self._state = state
        self._links = links
        self._proposer = Proposer(state, ring_order)
        self._told_waiting = ""
        self._writing: tuple[Votes, Callable[[str], None]] | None = None
        """Votes that are being written to the disk, and what to call then: with the reason if they could not be."""
        self._fencing: Propose | None = None
        """A proposal that the program has to be fenced for."""
        self._unsure: Epoch | None = None
        """A proposal of this peer whose commit could not be written. The disk may have it all the same, and a later
        process of this machine would find it there: so it is no abandoned one until other votes are on the disk."""

    @property
    def deadline(self) -> float:
        """When something is due without an event, in the state's `time`."""
        return self._proposer.deadline if self._writing is None else inf

    # --- a member -----------------------------------------------------------------------------------------------------

    def consider(self, contact: Contact | None, proposal: Propose) -> None:
        """Answer a proposal of the leader, or this peer's own (without a `contact`)."""
        state = self._state
        leader = state.me.peer if contact is None else contact.peer
        epoch = proposal.epoch
        if epoch.leader != leader or proposal.term.candidate != leader:
            assert contact is not None
            self._links.refuse(contact, f"it makes a proposal in the name of {epoch.leader}")
            return
        why = self._objection(proposal)
        if why is not None:
            self._answer(epoch, why)
            return
        if leader != state.me.peer:
            self._proposer.rest()  # from now on, this peer must never commit its own proposal
        if state.run_state is None:
            self._write(state.voter.accepting(proposal), partial(self._accept, proposal))
        else:
            self._fencing = proposal
            state.out.append(Fence(epoch.number, epoch.ended))

    def fenced(self, number: int, run_state: RunState) -> None:
        """The program is fenced for epoch `number`: it does nothing more in earlier ones, so this peer is in none."""
        state, proposal, before = self._state, self._fencing, self._state.run_state
        # A learner that has caught up stays ready if nothing comes of the epoch: it says so only once.
        is_ready = before is not None and before.is_ready and before.mark == run_state.mark
        state.run_state = run_state = replace(run_state, is_ready=is_ready)
        state.end_epoch(state.voter.leave(), f"epoch {number} was proposed")
        if proposal is None or proposal.epoch.number != number:
            state.voter.pass_over(number)
            return
        self._fencing = None
        why = self._objection(proposal) or state.voter.state_objection(proposal, run_state)
        if why is not None:
            state.voter.pass_over(number)
            self._answer(proposal.epoch, why)
        else:
            self._write(state.voter.accepting(proposal), partial(self._accept, proposal))

    def _write(self, votes: Votes, then: Callable[[str], None]) -> None:
        """Have votes written. They must be on the disk before they take effect; until then this peer casts no other."""
        self._writing = (votes, then)
        self._state.out.append(Persist(votes))

    def written(self, votes: Votes, why: str) -> None:
        """`votes` are on the disk and take effect; or that failed, for the reason `why`, and they have none."""
        if not why:
            self._unsure = None
        if self._writing is not None and self._writing[0] is votes:
            (_, then), self._writing = self._writing, None
            then(why)

    def _accept(self, proposal: Propose, why: str) -> None:
        state, epoch = self._state, proposal.epoch
        objection = why or self._objection(proposal)  # again: the disk may have taken long
        if not objection:
            state.end_epoch(state.voter.accept(proposal), f"{epoch} follows")
        elif state.run_state is not None:
            state.end_epoch(state.voter.leave(), f"epoch {epoch.number} was proposed")
            state.voter.pass_over(epoch.number)
        self._answer(epoch, objection)

    def _objection(self, proposal: Propose) -> str | None:
        state, wanted = self._state, set(proposal.epoch.peers)
        if self._writing is not None:
            return "my disk is slow: an earlier vote is still being written"
        if state.election.leader != proposal.epoch.leader:
            return f"I follow {state.election.leader}"
        why = state.voter.objection(proposal)
        if why is not None:
            return why
        unseen = wanted - state.reports.keys() - {state.me.peer}
        if unseen:
            return f"I do not see {min(unseen)}"
        current = set(state.voter.current.peers) if state.voter.current else set[str]()
        if state.run_state is None and state.holds and self._is_whole() and wanted > current:
            return "I hold the epoch: new peers must wait"  # the leader may not have known when it proposed
        return None

    def _is_whole(self) -> bool:
        """Return whether this peer is in an epoch that no member has left for a later one. A member that has left does
        not come back, so holding the epoch would keep the rest waiting."""
        state, current = self._state, self._state.voter.current
        others = () if current is None else (peer for peer in current.peers if peer in state.reports)
        return current is not None and all(state.reports[p].votes.highest <= current.number for p in others)

    def _answer(self, epoch: Epoch, objection: str | None) -> None:
        """Tell the leader of `epoch`, possibly this peer, whether it accepts."""
        answer = Reject(epoch.number, objection[:256]) if objection else Accept(epoch.number)
        self._state.tell_report()
        if epoch.leader == self._state.me.peer:
            self.answered(epoch.leader, answer)
        else:
            self._state.tell((epoch.leader,), answer)

    def committed(self, contact: Contact, number: int) -> None:
        """The peer of `contact` says that all members have accepted its proposal."""
        if number > self._state.voter.votes.highest:
            self._links.refuse(contact, f"it commits epoch {number}, which this peer never accepted")
            return
        self.start((number, contact.peer))

    def start(self, key: tuple[int, str]) -> None:
        """The epoch of `key` is committed. This peer is in it, unless it has accepted a later one."""
        epoch = self._state.voter.commit(key)
        if epoch is not None:
            self._proposer.started(epoch)
            self._state.yields = 0
            if self._state.run_state is not None:
                self._state.run_state = replace(self._state.run_state, is_ready=False)
            self._state.notify(EpochStarted(epoch))
            self.check_current()  # a member may have been lost since it was accepted

    def check_current(self) -> None:
        """End the current epoch if this peer has lost a member, if members went on without it, or if it may not
        continue."""
        state = self._state
        known = {state.me.peer, *state.reports}
        missing = set(state.voter.current.peers) - known if state.voter.current else set[str]()
        state.is_stuck = not state.voter.votes.companions <= known and bool(self._unlawful(known))
        if missing or state.is_stuck:
            state.end_epoch(state.voter.leave(), f"contact with {_listed(missing)} is lost")
        gone = self._gone_on()
        if gone:
            state.end_epoch(state.voter.leave(), f"{_listed(gone)} went on without this peer")

    def _gone_on(self) -> set[str]:
        """Return the members of the current epoch that are in a later one: they do not come back."""
        state, current = self._state, self._state.voter.current
        members = () if current is None else (peer for peer in current.peers if peer in state.reports)
        formed = {peer: state.reports[peer].votes.formed for peer in members}
        return {peer for peer, last in formed.items() if last and current and last.number > current.number}

    def _unlawful(self, known: set[str]) -> list[Epoch]:
        """Return the epochs of which this peer needs a majority and does not have one."""
        state = self._state
        return unlawful(known, state.voter.votes, state.departed, state.without, state.config.on_partition)

    def _why_stuck(self) -> str:
        """Say which peers this one waits for."""
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
            what = "too few members of the last epoch are connected; the others may be at work elsewhere"
            return f"{what}. Missing: {_listed(ours)}"
        if not earlier or state.time < DISCOVERY * state.config.settle:
            return ""
        which = "; several machines share that name: use the id in brackets" if shared else ""
        return (
            f"an earlier process of this machine was in a group with {_listed(earlier)}, which may still be at work. "
            "Start the program there too; for one that is gone for good, start this one with --restart-without NAME "
            f"(RINGFORT_RESTART_WITHOUT){which}"
        )

    def _why_full(self) -> str:
        """Say that the elastic run goes on without this peer, because it has as many members as it may have."""
        state, most = self._state, self._state.config.max_peers
        if state.run_state is None or most is None or state.voter.current is not None:
            return ""
        for report in state.reports.values():
            epoch = report.votes.formed
            is_current = epoch is not None and report.current == epoch.number
            if epoch is not None and is_current and state.me.peer not in epoch.peers and len(epoch.holders) > most:
                what = f"the run has {len(epoch.holders)} members, as many as it may have (nodes)"
                return f"{what}. This machine takes the next place that is free"
        return ""

    # --- the leader ---------------------------------------------------------------------------------------------------

    def lead(self) -> None:
        """Propose, if this peer leads; and tell the program what it waits for."""
        state = self._state
        why = self._why_stuck() if state.is_stuck else self._why_full()
        if state.election.state is not ElectionState.MASTER:
            self._proposer.rest()
        elif self._writing is None:
            why = self._propose() or why
        if self._writing is None:  # otherwise it may be about to commit what it proposed
            pending = self._proposer.pending
            state.voter.abandon({self._unsure, None if pending is None else pending.epoch})
        if why != self._told_waiting:
            self._told_waiting = why
            if why:
                state.notify(Waiting(why))

    def _propose(self) -> str:
        """Make the next proposal if it is due. Return what the leader waits for."""
        state, proposal = self._state, self._proposer.step()
        free = (peer for peer, report in state.reports.items() if not (report.stuck or state.is_witness(peer)))
        if self._proposer.is_stuck and any(free):
            state.step_down()
        if proposal is not None:
            state.tell(proposal.epoch.peers, proposal)
            self.consider(None, proposal)
        return self._proposer.why

    def answered(self, peer: str, answer: Accept | Reject) -> None:
        """`peer` accepts this peer's proposal or not; after the last member has accepted, it is committed."""
        if isinstance(answer, Reject):
            self._proposer.rejected(peer, answer.number, answer.why)
            return
        epoch = self._proposer.accepted(self._state.time, peer, answer.number)
        if epoch is not None and self._state.voter.has_given_up(epoch):
            self._proposer.give_up(_COPIED)
        elif epoch is not None:
            self._write(self._state.voter.committing(epoch.key), partial(self._commit, epoch))

    def _commit(self, epoch: Epoch, why: str) -> None:
        # What `learned` has had written after it does not show the epoch as committed: if this peer told the members
        # and died, the next process of its machine would say that it never was, and some would go on without the rest.
        if not why and self._state.voter.has_given_up(epoch):
            why = _COPIED
        if why:
            self._unsure = epoch
            self._proposer.give_up(why)
            return
        self._state.tell(epoch.peers, Commit(epoch.number))
        self.start(epoch.key)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
