"""`Epochs`: a peer's part in agreeing on epochs: it considers, accepts, commits and, as the leader, proposes. Pure.

What is lawful is in membership.py; what a leader proposes, and when, in proposing.py.
"""

from __future__ import annotations

from math import inf

from ringfort.cluster.contacts import Contact
from ringfort.cluster.election import ElectionState
from ringfort.cluster.events import EpochStarted, Waiting
from ringfort.cluster.heartbeats import Heartbeats
from ringfort.cluster.instructions import Remember
from ringfort.cluster.links import Links
from ringfort.cluster.membership import Evidence, is_lawful, records_of
from ringfort.cluster.messages import Accept, Commit, Epoch, Propose, Reject
from ringfort.cluster.proposing import Proposer, RingOrder, Situation
from ringfort.cluster.state import PeerState


class Epochs:
    """The part of a core that is in epochs. `lead` and `judge` are to be called after every change."""

    def __init__(self, state: PeerState, links: Links, beats: Heartbeats, ring_order: RingOrder | None) -> None:
        self._state = state
        self._links = links
        self._beats = beats
        self._proposer = Proposer(state.me.peer, state.config, ring_order)
        self._deferred: tuple[Propose, float] | None = None
        """A proposal that is accepted when the lease is over, and when that is."""
        self._told_waiting = ""

    @property
    def deadline(self) -> float:
        """When something is due even if nothing happens, in the state's `time`."""
        return min(self._proposer.deadline, inf if self._deferred is None else self._deferred[1])

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
        # The law: those of our last epochs who are left out, and may be alive, are not answered until the lease is
        # over; only then do we go without them.
        left_out = state.ledger.companions() - set(epoch.peers) - state.departed.keys() - state.witnessed.keys()
        ready = self._beats.lease_over(left_out)
        if state.time >= ready:
            self._accept(leader, proposal)
        else:
            self._beats.mute(left_out)
            self._deferred = (proposal, ready)

    def _objection(self, leader: str, proposal: Propose) -> str | None:
        state, wanted = self._state, set(proposal.epoch.peers)
        if state.election.leader != leader:
            return f"I follow {state.election.leader}"
        why = state.ledger.objection(proposal)
        if why is not None:
            return why
        unseen = wanted - state.reports.keys() - {state.me.peer}
        if unseen:
            return f"I do not see {min(unseen)}"
        current = state.ledger.current
        if state.holds and current is not None and wanted > set(current.peers):
            return "I hold: newcomers must wait"  # the leader may have proposed before it knew
        return None

    def _accept(self, leader: str, proposal: Propose) -> None:
        state = self._state
        self._drop_deferred()
        if leader != state.me.peer:
            self._proposer.rest()  # the law: what we proposed ourselves, we never commit from now on
        left = state.ledger.accept(proposal)
        state.out.append(Remember(state.ledger.standing))
        state.end_epoch(left, f"{proposal.epoch} is to follow")
        self._answer(leader, Accept(proposal.epoch.number))

    def _answer(self, leader: str, message: Accept | Reject) -> None:
        state = self._state
        state.tell_report()
        contact = state.contacts.get(leader)
        if contact is not None:
            state.send(contact.link, message)
        elif leader == state.me.peer and isinstance(message, Accept):
            self.accepted(leader, message.number)
        elif leader == state.me.peer:
            self.rejected(leader, message.number)

    def take_up_deferred(self) -> None:
        """Accepts what was put off until the lease is over, if it is, or drops what came to nothing."""
        if self._deferred is None:
            return
        state = self._state
        proposal, ready = self._deferred
        leader = proposal.epoch.leader
        contact = state.contacts.get(leader)
        is_on = self._proposer.pending is proposal if leader == state.me.peer else contact is not None
        is_on = is_on and state.election.leader == leader
        if is_on and state.time < ready:
            return
        self._drop_deferred()
        if is_on:
            self.consider(contact, proposal)

    def _drop_deferred(self) -> None:
        self._deferred = None
        self._beats.mute(())

    def committed(self, contact: Contact, number: int) -> None:
        """The peer of `contact` says that all have accepted what it proposed."""
        if number > self._state.ledger.standing.highest:
            self._links.refuse(contact, f"it commits epoch {number}, which we never accepted")
            return
        self.start((number, contact.peer))

    def start(self, key: tuple[int, str]) -> None:
        """The epoch of `key` is committed, and this peer in it, unless it has gone on since."""
        state = self._state
        epoch = state.ledger.commit(key)
        if epoch is not None:
            self._started(epoch)

    def _started(self, epoch: Epoch) -> None:
        state = self._state
        mates = state.ledger.companions()
        state.witnessed = {peer: seen for peer, seen in state.witnessed.items() if peer in mates}
        self._beats.forget_all_but(mates)
        state.notify(EpochStarted(epoch))
        self.judge()  # somebody may have been lost since it was accepted

    def judge(self) -> None:
        """An epoch is over for a member that has lost another, or that may not go on."""
        state = self._state
        known = {state.me.peer, *state.reports}
        missing = set(state.ledger.current.peers) - known if state.ledger.current else set[str]()
        state.is_stuck = not state.ledger.companions() <= known and not self._may_go_on(known)
        if missing or state.is_stuck:
            state.end_epoch(state.ledger.leave(), f"contact with {', '.join(sorted(missing))} is lost")

    def _may_go_on(self, known: set[str]) -> bool:
        state = self._state
        pairs = {(peer, seen.peer) for peer, report in state.reports.items() for seen in report.witnessed}
        pairs |= {(state.me.peer, dead) for dead in state.witnessed}
        evidence = Evidence(frozenset(state.departed), frozenset(pairs))
        policy = state.config.on_partition
        return all(is_lawful(known, record, evidence, policy) for record in records_of(state.ledger.standing))

    # --- the leader ---------------------------------------------------------------------------------------------------

    def lead(self) -> None:
        """The leader's turn; and everybody tells the program what it waits for."""
        state = self._state
        why = "too few of the last epoch are in sight; they may be at work elsewhere" if state.is_stuck else ""
        if state.election.state is not ElectionState.MASTER:
            self._proposer.rest()
        else:
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
            state.ledger.current,
            state.ledger.standing,
            {**state.reports, me.peer: state.own_report()},
            {me.peer: me, **{c.peer: c.hello.member for c in state.contacts if c.hello is not None}},
            state.departed,
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
        if epoch is None:
            return
        started = state.ledger.commit(epoch.key)
        state.out.append(Remember(state.ledger.standing))
        state.tell(epoch.peers, Commit(number))
        if started is not None:
            self._started(started)

    def rejected(self, peer: str, number: int) -> None:
        """`peer` does not accept what we proposed."""
        self._proposer.rejected(self._state.time, peer, number)
