"""The leader's side of membership: which epoch to propose, and when. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from ringfort.cluster.core.membership import Basis, heritage, largest_lawful, records_of, seat
from ringfort.cluster.core.peer_messages import MAX_MEMBERS, Epoch, Member, Propose, Report, Term, Votes
from ringfort.config import AutoDiscoveryConfig

QUICK: Final = 0.1
"""Seconds that the group must not have changed before an epoch that was broken is followed: who died together is left
out together. Also where nobody else is to be waited for."""
ANSWER: Final = 1.5
"""Seconds that members have to accept at first; twice as long after each time that they did not. A member accepts when
its promise is on its disk, which takes milliseconds, or seconds where the disk is slow."""
MAX_LATE: Final = 4
"""Times that this is doubled at most."""
TOO_FEW: Final = "other peers are here"
"""The end of what a leader says that waits for more peers and for nothing else."""
MAX_FAILURES: Final = 4
"""Proposals in a row that came to nothing, after which they are made no more slowly, and people are told why."""
NEWS: Final = 1.0
"""Seconds after a commit before a member that has not reported it is asked again."""

RingOrder = Callable[[Sequence[Member]], Sequence[int]]
"""The leader's choice of ring order for an epoch's members: their indices."""


@dataclass(frozen=True)
class Situation:
    """What the leader knows."""

    term: Term
    current: Epoch | None
    votes: Votes
    reports: Mapping[str, Report]
    """Of all in sight, its own too."""
    members: Mapping[str, Member]
    departed: Mapping[str, Votes]
    without: Collection[str] = ()


class Proposer:
    """Proposes one epoch at a time. `why` says what it waits for, `deadline` until when."""

    def __init__(self, me: str, config: AutoDiscoveryConfig, ring_order: RingOrder | None = None) -> None:
        self.me = me
        self.pending: Propose | None = None
        self.deadline = inf
        self.why = ""
        self.is_stuck = False
        """Others may have an epoch, but not with this peer: let one of them lead."""
        self._config = config
        self._ring_order = ring_order
        self._accepted: set[str] = set()
        self._wanted: frozenset[str] = frozenset()
        self._since = 0.0
        self._first: float | None = None
        self._failures = 0
        self._why_failed = ""
        self._late = 0
        self._committed_at = -inf
        self._last_number = 0
        self._largest: Counter[str] = Counter()
        """The hosts of the largest epoch that this peer was in."""

    def started(self, epoch: Epoch) -> None:
        """Note that this peer is now in `epoch`, whichever peer proposed it."""
        if len(epoch.members) >= self._largest.total():
            self._largest = Counter(member.host for member in epoch.members)

    def rest(self) -> None:
        """This peer does not lead: what it proposed is given up, and never committed."""
        self.pending, self.deadline, self.is_stuck, self._first = None, inf, False, None

    def step(self, now: float, situation: Situation) -> Propose | None:
        """The next proposal, if its time has come."""
        self.is_stuck, self.why, self.deadline = False, "", inf
        if self.pending is not None:
            if now < self.pending_until and situation.reports.keys() >= set(self.pending.epoch.peers):
                self.deadline = self.pending_until
                return None
            self._late = min(self._late + (now >= self.pending_until), MAX_LATE)
            self._fail(now)
        group, basis = largest_lawful(
            self._clique(situation),
            {peer: report.votes for peer, report in situation.reports.items()},
            situation.departed,
            situation.without,
            self._config.on_partition,
        )
        if self.me not in group:
            self.is_stuck = True
            return None
        if len(group) - 1 < self._config.min_peers:
            self.why = f"{len(group) - 1} of at least {self._config.min_peers} {TOO_FEW}"
            return None
        if self._failures == MAX_FAILURES:  # most objections are gone by the next try
            self.why = self._why_failed
        due = self._due(now, frozenset(group), situation)
        if now < due:
            self.deadline = due
            return None
        return self._propose(now, group, basis, situation)

    def accepted(self, now: float, peer: str, number: int) -> Epoch | None:
        """`peer` accepts. Returns the epoch if now all have: it is committed."""
        if self.pending is None or self.pending.epoch.number != number:
            return None
        epoch = self.pending.epoch
        self._accepted.add(peer)
        # The law: every member, not a majority. Otherwise one of them could still be at work in an older epoch.
        if not self._accepted >= set(epoch.peers):
            return None
        self.pending, self._first, self._failures, self._late, self._committed_at = None, None, 0, 0, now
        return epoch

    def rejected(self, now: float, peer: str, number: int, why: str = "") -> None:
        """`peer` does not accept: the epoch is given up."""
        if self.pending is not None and self.pending.epoch.number == number and peer in self.pending.epoch.peers:
            self.give_up(now, f"{'this peer' if peer == self.me else peer} does not accept: {why}")

    def give_up(self, now: float, why: str) -> None:
        """The epoch that was proposed is never committed; another will be."""
        self._fail(now)
        self._why_failed = why

    def _fail(self, now: float) -> None:
        self.pending = None
        self._since = now
        self._failures = min(self._failures + 1, MAX_FAILURES)

    # --- who --------------------------------------------------------------------------------------------------------

    def _clique(self, situation: Situation) -> list[str]:
        """Peers that all see each other, this one among them: members of the last epoch in their order, then others by
        id. Who does not see one that comes before it waits."""
        known = situation.reports
        before = situation.votes.formed
        old = [peer for peer in (before.peers if before else ()) if peer in known and peer != self.me]
        group = [self.me]
        sees = {peer: set(report.sees) for peer, report in known.items()}
        for peer in [*old, *sorted(known.keys() - set(old) - {self.me})]:
            if all(other in sees[peer] and peer in sees[other] for other in group):
                group.append(peer)
        most = self._config.max_peers
        return group[: MAX_MEMBERS if most is None else min(most + 1, MAX_MEMBERS)]

    # --- when -------------------------------------------------------------------------------------------------------

    def _due(self, now: float, wanted: frozenset[str], situation: Situation) -> float:
        current = situation.current
        if current is not None and wanted >= set(current.peers):
            all_in = all(situation.reports[peer].current == current.number for peer in current.peers)
            is_held = any(situation.reports[peer].holds for peer in current.peers)
            if all_in and (is_held or len(wanted) == len(current.peers)):
                self._first = None
                return inf
            if not all_in and now < self._committed_at + NEWS:
                return self._committed_at + NEWS
        if wanted != self._wanted or self._first is None:
            self._wanted, self._since = wanted, now
        if self._first is None:
            self._first = now
        is_broken = current is None and situation.votes.formed is not None
        settle = QUICK if is_broken or self._are_all(wanted, situation) else self._config.settle
        return max(min(self._since + settle, self._first + 3 * settle), self._backoff())

    def _are_all(self, wanted: frozenset[str], situation: Situation) -> bool:
        """Return whether no other peer is expected: `max_peers` are present, or all machines of the largest epoch."""
        hosts = Counter(situation.members[peer].host for peer in wanted)
        return len(wanted) - 1 == self._config.max_peers or hosts == self._largest

    def _backoff(self) -> float:
        """Proposals that fail again and again are made ever more slowly, up to 0.8 s."""
        return self._since + QUICK * 2 ** (self._failures - 1) if self._failures else -inf

    # --- what -------------------------------------------------------------------------------------------------------

    def _propose(self, now: float, group: Sequence[str], basis: Basis, situation: Situation) -> Propose:
        number = max(basis.highest, situation.votes.highest, self._last_number) + 1
        own = () if situation.votes.formed is None else (situation.votes.formed,)
        before = max(
            (*basis.formed, *own),
            key=lambda epoch: (len(set(epoch.peers) & set(group)), epoch.number),
            default=None,
        )
        members = seat(before, {peer: situation.members[peer] for peer in group}, number)
        ring = tuple(self._ring_order(members)) if self._ring_order else ()
        lineages, ended = heritage(basis.formed, group, {*situation.departed, *situation.without})
        if not lineages and (len(group) > 1 or basis.doubts or ended):
            lineages = (f"{self.me}#{number}",)
        # Of what the members hold, not of what the epoch rests on: they must see why something no longer counts.
        held = [record for peer in group for record in records_of(situation.reports[peer].votes)]
        concerned = {peer for record in (*basis.records, *held) for peer in record.peers}
        self.pending = Propose(
            situation.term,
            Epoch(number, self.me, members, ring, lineages, ended),
            basis.formed,
            basis.doubts,
            tuple(sorted(situation.departed.keys() & concerned)),
            tuple(sorted(set(situation.without) & concerned)),
        )
        self.pending_until = self.deadline = now + ANSWER * 2**self._late
        self._accepted = set()
        self._last_number = number
        return self.pending

    pending_until = inf
