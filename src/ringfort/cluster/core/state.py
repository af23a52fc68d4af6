"""`PeerState`: what a peer knows and what it is about to send, shared by the parts of its core. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from ringfort.cluster.core.contacts import Contact, Contacts, node_of
from ringfort.cluster.core.election import Claim, ElectionManager
from ringfort.cluster.core.events import ClusterEvent, EpochEnded, Instruction, Notify, Send
from ringfort.cluster.core.health import HealthMonitor
from ringfort.cluster.core.membership import Voter, known_to
from ringfort.cluster.core.peer_messages import MAX_NUMBER, AnyMessage, Departed, Epoch, Member, Report, RunState, Votes
from ringfort.config import AutoDiscoveryConfig
from ringfort.errors import InvalidArgumentError

LEAP: Final = 0.4
"""Seconds (two heartbeats). Of a longer time between two events, only this much counts as time awake: a peer that slept
must not find the others silent."""


class PeerState:
    """What more than one part of the core needs. The parts change it; it decides nothing."""

    def __init__(self, me: Member, config: AutoDiscoveryConfig, now: float, work_done: Callable[[], int]) -> None:
        self.me = me
        self.config = config
        self.now = now
        """The clock's reading, by which ages are measured."""
        self.time = 0.0
        """Seconds for which this peer was certainly awake; a leap of the clock counts for little. Timeouts of other
        peers are measured by it."""
        self.contacts = Contacts(me)
        self.health = HealthMonitor(config.health)
        self.election = ElectionManager(me.peer, config.election, 0.0, stands=me.slots > 0)
        self.voter = Voter(me.peer, config.on_partition)
        self.out: list[Instruction] = []
        """The instructions for the node."""
        self.reports: dict[str, Report] = {}
        """The latest report of every peer that counts and has a working link."""
        self.claims: dict[str, Claim] = {}
        """Their claims in an election, which follow from their reports."""
        self.departed: dict[str, Votes] = {}
        """Peers that have certainly ended, with their last votes."""
        self.vouched: dict[str, Departed] = {}
        """The ended processes of this node, which this peer reports to others."""
        self.restart_without: tuple[str, ...] = ()
        """Members of earlier epochs that a person at this machine has excluded."""
        self._recalled = Votes()
        self.work = 0
        """The work done when the last epoch ended."""
        self.holds = False
        self.busy = False
        """The program of this peer runs but does not respond."""
        self.step = 0
        """Training steps that the program has done."""
        self.run_state = RunState() if config.elastic and me.slots else None
        """Where the program is in an elastic run; None if it is in none, and for a witness, which has no state."""
        self.is_stuck = False
        """It may not continue: too many members of its last epoch are not connected."""
        self.yields = 0
        """See `Report.yields`. Another leader does not change it: that one may have to step down too, and then a third
        is to lead, not this one again."""
        self._told: Report | None = None
        self._work_done = work_done

    def advance(self, now: float) -> None:
        """Set the time. Raise `InvalidArgumentError` if the clock goes back."""
        if now < self.now:
            raise InvalidArgumentError("now", now, f"the clock went back from {self.now}")
        self.time += min(now - self.now, LEAP)
        self.now = now

    # --- who counts ---------------------------------------------------------------------------------------------------

    @property
    def sees(self) -> tuple[str, ...]:
        """The peers it has a working link with."""
        return tuple(sorted(self.reports.keys() - {self.me.peer}))

    @property
    def can_vote(self) -> bool:
        """Whether this peer can be in an epoch. An observer cannot."""
        return self.me.slots > 0 or self.me.witness

    def counts(self, contact: Contact) -> bool:
        """Return whether this peer and the other may be in one epoch. Observers and peers of another run may not: they
        do not vote here, and nobody waits for them."""
        assert contact.hello is not None
        other = contact.hello.member
        return self.can_vote and (other.slots > 0 or other.witness) and contact.hello.run == self.config.run

    def concerns(self, contact: Contact) -> bool:
        """Return whether the program hears when the other peer comes and goes: if that one counts. An observer hears of
        all that are not observers themselves, because it shows them to people."""
        assert contact.hello is not None
        other = contact.hello.member
        return self.counts(contact) or (not self.can_vote and (other.slots > 0 or other.witness))

    def is_witness(self, peer: str) -> bool:
        """Return whether this or a connected peer that counts is a witness."""
        if peer == self.me.peer:
            return not self.me.slots
        contact = self.contacts.get(peer)
        return contact is not None and contact.hello is not None and not contact.hello.member.slots

    def recall(self, all_votes: Iterable[Votes]) -> None:
        """Take over the votes of earlier processes of this machine."""
        self.voter.recall(all_votes)
        self._recalled = self.voter.votes
        self.find_restart_without()

    def find_restart_without(self) -> None:
        """Resolve the names in `config.restart_without` to peers of earlier epochs, including epochs that only departed
        peers have reported. Names are not resolved any more once this process has accepted a proposal itself: a live
        machine with that name may be a member of it."""
        named = set(self.config.restart_without)
        if named and self.voter.votes is self._recalled:
            members = {member for record in known_to(self._recalled, self.departed) for member in record.members}
            shared = ambiguous_names(members)
            gone = {m.peer for m in members if named & {m.peer, node_of(m.peer), *({m.name} - shared)}}
            self.restart_without = tuple(sorted(gone))

    @property
    def without(self) -> set[str]:
        """The peers that a person has excluded, at this machine or at a connected one."""
        return {*self.restart_without, *(peer for report in self.reports.values() for peer in report.without)}

    @property
    def dead(self) -> set[str]:
        """The peers that do not count in a majority."""
        return self.departed.keys() | self.without

    def note(self, peer: str, report: Report) -> None:
        """Keep the report of a peer that counts."""
        self.reports[peer] = report
        self.claims[peer] = _claim(peer, report, is_witness=self.is_witness(peer))

    def forget(self, peer: str) -> None:
        """Drop the report of a peer that is not connected any more."""
        self.reports.pop(peer, None)
        self.claims.pop(peer, None)

    def end_epoch(self, left: Epoch | None, why: str) -> None:
        """Note that this peer has left `left`, if it was in an epoch. Its work is counted now, because an election may
        follow."""
        if left is not None:
            self.work = min(self._work_done(), MAX_NUMBER - 1)
            self.notify(EpochEnded(left, why))

    # --- sending -----------------------------------------------------------------------------------------------------

    def own_report(self) -> Report:
        """Return this peer's report."""
        votes, current = self.voter.votes, self.voter.current
        number = 0 if current is None else current.number
        run_state = self.run_state
        if run_state is not None:
            run_state = msgspec.structs.replace(run_state, is_learner=self.voter.is_learner)
        return Report(
            votes,
            number,
            self.sees,
            self.restart_without,
            self.work,
            self.holds,
            self.is_stuck,
            self.yields,
            run_state,
        )

    def step_down(self) -> None:
        """Stop leading, if this peer leads, so that each of the others can lead before it does again."""
        if self.election.leader == self.me.peer:
            last = max((report.yields for report in self.reports.values()), default=0)
            self.yields = min(max(last, self.yields) + 1, MAX_NUMBER - 1)
        self.election.step_down(self.time)
        self.tell_election()

    def own_claim(self) -> Claim:
        """Return this peer's claim in an election."""
        return _claim(self.me.peer, self.own_report(), is_witness=not self.me.slots)

    def tell_report(self) -> None:
        """Send this peer's report to all, if it has changed."""
        report = self.own_report()
        if report != self._told:
            self._told = report
            self.tell(None, report)

    def tell_election(self) -> None:
        """Send the messages and publish the events of the election."""
        election = self.election
        for peer, message in election.outbox:
            self.tell(None if peer is None else (peer,), message)
        for event in election.events:
            self.notify(event)
        election.outbox.clear()
        election.events.clear()

    def tell(self, peers: Iterable[str] | None, message: AnyMessage) -> None:
        """Send a message to those of `peers` that are connected, in that order; None for all that are."""
        for contact in self.contacts if peers is None else filter(None, map(self.contacts.get, peers)):
            self.send(contact.link, message)

    def send(self, link: int, message: AnyMessage) -> None:
        """Send a message on one link."""
        self.out.append(Send(link, message))

    def notify(self, event: ClusterEvent) -> None:
        """Publish an event to the program."""
        self.out.append(Notify(event))


def ambiguous_names(members: Iterable[Member]) -> set[str]:
    """Return the names that more than one machine uses, for example copies of one disk image."""
    hosts: dict[str, set[str]] = {}
    for member in members:
        hosts.setdefault(member.name, set()).add(member.host)
    return {name for name, machines in hosts.items() if name and len(machines) > 1}


def _claim(peer: str, report: Report, *, is_witness: bool) -> Claim:
    formed, stuck, yields = report.votes.formed, report.stuck, report.yields
    if is_witness:
        return Claim(True, MAX_NUMBER, 1, MAX_NUMBER, 0, peer)  # the last of all: it votes for others
    # A learner's last epoch is of a run that it has left: its number says nothing about the run that it joins.
    if formed is None or (report.state is not None and report.state.is_learner):
        return Claim(stuck, yields, 0, MAX_NUMBER, -report.work, peer)
    joined = next(member.joined for member in formed.members if member.peer == peer)
    return Claim(stuck, yields, -formed.number, joined, -report.work, peer)
