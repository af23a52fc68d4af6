"""`Proposer`: the leader's side of membership: which epoch to propose, and when. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from ringfort.cluster.core.membership import Basis, copied_by, heritage, largest_lawful, seat
from ringfort.cluster.core.peer_messages import MAX_MEMBERS, Epoch, Member, Propose, Report, RunState
from ringfort.cluster.core.run_members import Evidence, run_members
from ringfort.cluster.core.state import PeerState

QUICK: Final = 0.1
"""Seconds without a change before an epoch is proposed if no other peer is expected."""
BROKEN: Final = 0.03
"""The same for an epoch that follows a broken one, or that adds members to an elastic run, in which all wait for it.
Peers that died together are left out together if their words come within this time; else another epoch follows."""
ANSWER: Final = 1.5
"""Seconds that members have to accept at first, doubled after each timeout. A member accepts when its vote is on its
disk, which takes milliseconds, or seconds if the disk is slow."""
MAX_LATE: Final = 4
"""Limit of these doublings."""
TOO_FEW: Final = "other peers are here"
"""The end of the message of a leader that only waits for more peers."""
MAX_FAILURES: Final = 4
"""Failed proposals in a row after which the pause between them stops growing and the program is told the reason."""
NEWS: Final = 1.0
"""Seconds after a commit in which all members have to report it. Before that, a report says nothing: a member that has
not heard of the commit looks like one that is not in the epoch, and a new one like a learner."""

RingOrder = Callable[[Sequence[Member]], Sequence[int]]
"""Returns the ring order for an epoch's members, as indices."""


class Proposer:
    """Proposes one epoch at a time. `why` says what it waits for, `deadline` until when."""

    def __init__(self, state: PeerState, ring_order: RingOrder | None = None) -> None:
        self.me = state.me.peer
        self.pending: Propose | None = None
        self.deadline = inf
        self.why = ""
        self.is_stuck = False
        """Other peers may form an epoch, but not with this one, so one of them should lead."""
        self._state = state
        self._ring_order = ring_order
        self._accepted: set[str] = set()
        self._wanted: frozenset[str] = frozenset()
        self._since = 0.0
        self._first: float | None = None
        self._failures = 0
        self._failed_at = -inf
        self._why_failed = ""
        self._late = 0
        self._pending_until = inf
        self._committed_at = -inf
        self._last_number = 0
        self._largest: Counter[str] = Counter()
        """The hosts of the largest epoch that this peer was in."""

    def started(self, epoch: Epoch) -> None:
        """Note that this peer is now in `epoch`, whichever peer proposed it."""
        if len(epoch.members) >= self._largest.total():
            self._largest = Counter(member.host for member in epoch.members)

    def rest(self) -> None:
        """This peer does not lead. Its proposal is abandoned and never committed."""
        self.pending, self.deadline, self.is_stuck, self._first = None, inf, False, None

    def step(self) -> Propose | None:
        """Return the next proposal if it is due."""
        state, now = self._state, self._state.time
        self.is_stuck, self.why, self.deadline = False, "", inf
        reports = {**state.reports, self.me: state.own_report()}
        if self.pending is not None:
            if now < self._pending_until and reports.keys() >= set(self.pending.epoch.peers):
                self.deadline = self._pending_until
                return None
            self._late = min(self._late + (now >= self._pending_until), MAX_LATE)
            self._fail()
        if self._awaits_news(reports):
            self.deadline = self._committed_at + NEWS
            return None
        all_votes = {peer: report.votes for peer, report in reports.items()}
        clique, at = self._clique(reports), None
        if state.run_state is not None:
            witnesses = [peer for peer in clique if state.is_witness(peer)]
            evidence = Evidence(state.departed, state.without, state.config.on_partition)
            clique, at = run_members(self.me, {peer: reports[peer] for peer in clique}, witnesses, evidence)
        group, basis = largest_lawful(clique, all_votes, state.departed, state.without, state.config.on_partition)
        if self.me not in group:
            self.is_stuck = True
            return None
        is_founding = state.run_state is None or (at is not None and not at.mark)
        others = sum(not state.is_witness(peer) for peer in group) - 1
        if is_founding and others < state.config.min_peers:
            self.why = f"{others} of at least {state.config.min_peers} {TOO_FEW}"
            return None
        if self._failures == MAX_FAILURES:  # most objections are gone by the next attempt
            self.why = self._why_failed
        members = {self.me: state.me, **{c.peer: c.hello.member for c in state.contacts if c.hello is not None}}
        due = self._due(reports, [members[peer] for peer in group])
        if now < due:
            self.deadline = due
            return None
        return self._propose(group, members, basis, reports, at)

    def accepted(self, now: float, peer: str, number: int) -> Epoch | None:
        """`peer` accepts. Return the epoch if all members have accepted, so that it is committed."""
        if self.pending is None or self.pending.epoch.number != number:
            return None
        epoch = self.pending.epoch
        self._accepted.add(peer)
        # Every member, not a majority: otherwise one of them could still be at work in an older epoch.
        if not self._accepted >= set(epoch.peers):
            return None
        self.pending, self._first, self._failures, self._late, self._committed_at = None, None, 0, 0, now
        return epoch

    def rejected(self, peer: str, number: int, why: str = "") -> None:
        """`peer` does not accept, so the proposal is abandoned."""
        if self.pending is not None and self.pending.epoch.number == number and peer in self.pending.epoch.peers:
            self.give_up(f"{'this peer' if peer == self.me else peer} does not accept: {why}")

    def give_up(self, why: str) -> None:
        """Abandon the proposal, which is never committed, and make another one later."""
        self._fail()
        self._why_failed = why

    def _fail(self) -> None:
        self.pending = None
        self._failed_at = self._state.time
        self._failures = min(self._failures + 1, MAX_FAILURES)

    # --- who --------------------------------------------------------------------------------------------------------

    def _clique(self, reports: dict[str, Report]) -> list[str]:
        """Return peers that all see each other, including this one: first members of the last epoch in their order,
        then others by id, then witnesses of an elastic run. A peer that does not see an earlier one has to wait."""
        state = self._state
        before = self._state.voter.votes.formed
        old = [peer for peer in (before.peers if before else ()) if peer in reports and peer != self.me]
        group = [self.me]
        sees = {peer: set(report.sees) for peer, report in reports.items()}
        most = MAX_MEMBERS if state.config.max_peers is None else min(state.config.max_peers + 1, MAX_MEMBERS)
        for peer in sorted([*old, *sorted(reports.keys() - set(old) - {self.me})], key=state.is_witness):
            is_wanted = state.run_state is not None if state.is_witness(peer) else len(group) < most
            if is_wanted and all(other in sees[peer] and peer in sees[other] for other in group):
                group.append(peer)
        return group[:MAX_MEMBERS]

    # --- when -------------------------------------------------------------------------------------------------------

    def _due(self, reports: dict[str, Report], group: Sequence[Member]) -> float:
        state, now, current = self._state, self._state.time, self._state.voter.current
        wanted = frozenset(member.peer for member in group)
        if current is not None and wanted >= set(current.peers):
            all_in = all(reports[peer].current == current.number for peer in current.peers)
            is_held = state.run_state is None and any(reports[peer].holds for peer in current.peers)
            if all_in and (is_held or len(wanted) == len(current.peers)):
                self._first = None
                return inf
        if wanted != self._wanted or self._first is None:
            self._wanted, self._since = wanted, now
        if self._first is None:
            self._first = now
        is_broken = current is None and state.voter.votes.formed is not None
        is_broken = is_broken or (state.run_state is not None and bool(state.run_state.mark))  # a new member is ready
        settle = BROKEN if is_broken else QUICK if self._are_all(group) else state.config.settle
        # Proposals that keep failing are made more and more slowly, up to 0.8 s after the last one. Not after the last
        # change: members that pause for a new one would always go on before that.
        backoff = self._failed_at + QUICK * 2 ** (self._failures - 1) if self._failures else -inf
        return max(min(self._since + settle, self._first + 3 * settle), backoff)

    def _awaits_news(self, reports: dict[str, Report]) -> bool:
        """Return whether a member of the epoch that this peer has just committed has not heard of that yet. One that
        has left the epoch or accepted a later one since is not waited for."""
        current = self._state.voter.current
        if current is None or self._state.time >= self._committed_at + NEWS:
            return False
        votes = (reports[peer].votes for peer in current.peers if peer in reports)
        return any(one.highest == current.number and current in one.doubts for one in votes)

    def _are_all(self, group: Sequence[Member]) -> bool:
        """Return whether no other peer is expected: `max_peers` are present, or all machines of the largest epoch."""
        hosts = Counter(member.host for member in group)
        others = sum(member.slots > 0 for member in group) - 1
        return others == self._state.config.max_peers or hosts == self._largest

    # --- what -------------------------------------------------------------------------------------------------------

    def _propose(
        self,
        group: Sequence[str],
        known: dict[str, Member],
        basis: Basis,
        reports: dict[str, Report],
        at: RunState | None,
    ) -> Propose:
        state, votes = self._state, self._state.voter.votes
        number = max(basis.highest, votes.highest, self._last_number) + 1
        followed = basis.formed if votes.formed is None else (*basis.formed, votes.formed)
        before = max(followed, key=lambda epoch: (len(set(epoch.peers) & set(group)), epoch.number), default=None)
        members = seat(before, {peer: known[peer] for peer in group}, number)
        ring = tuple(self._ring_order([m for m in members if m.slots])) if self._ring_order else ()
        copied_at = copied_by({peer: reports[peer].votes for peer in group}, group)
        lineages, ended = heritage(basis.formed, group, state.dead, copied_at)
        if not lineages and (len(group) > 1 or basis.doubts or ended or state.run_state is not None):
            lineages = (f"{self.me}#{number}",)
        # Of the members' own records, not of the basis: members must see why something no longer counts.
        held = [record for peer in group for record in reports[peer].votes.records]
        concerned = {peer for record in (*basis.records, *held) for peer in record.peers}
        self.pending = Propose(
            state.election.term,
            Epoch(number, self.me, members, ring, lineages, ended),
            basis.formed,
            basis.doubts,
            tuple(sorted(state.departed.keys() & concerned)),
            tuple(sorted(state.without & concerned)),
            at,
            tuple(sorted(copied_at.items())),
        )
        self._pending_until = self.deadline = state.time + ANSWER * 2**self._late
        self._accepted = set()
        self._last_number = number
        return self.pending
