"""The rules of membership: which group may follow which epoch, and what a peer votes for when it accepts one. Pure.

An epoch is committed when every member has accepted it. A peer accepts only rising numbers, and leaves its current
epoch when it accepts another. An epoch that it has accepted and whose outcome it does not know is a *doubt*. A new
epoch is lawful if it contains a majority of the last committed epoch **and of every doubt** of every member: two
successors of one epoch then share a member, and that member knows of the first when it is asked to accept the second.
(This is dynamic voting with ambiguous sessions: Lotem, Keidar and Dolev, "Dynamic voting for consistent primary
components", 1997.) Safety depends on no clock, lease or delay.

Abandoned proposals. Only the leader that proposed an epoch can commit it first, so its votes end the doubt of all
others, whether or not it is in the new epoch: they show the epoch as committed, or that this can never happen any more
(`Voter.abandon`, `Voter.hear`). Otherwise members that accepted an epoch could need a peer that they may not seat
before they have settled a step, and settle no step without that peer.

Lineages. Peers that never met may found two clusters. Each founding begins a *lineage*, and an epoch names the lineages
that it continues. A majority is required of each. A peer alone has no lineage: nobody can be split from it. A lineage
whose last epoch has no living member has *ended*: any group may follow it, but none continues it, because two might.

The dead. A member does not count if its own machine has reported that it has ended, with its last votes (*departed*):
the member itself when it left, its control process, or a later process of the machine that holds the dead one's lock. A
connection that was closed or reset proves nothing, because anyone on the path can do that: a lost peer counts as alive.

Elastic runs. The program of each member has the state of a run (`RunState`), and an epoch must not mix states. Members
of one epoch are in one branch and at most one step apart: an epoch that only shrinks keeps that, and every other epoch
says where all its members must be (`Propose.at`). A member accepts it only if it is there and holds nothing that others
may have applied, and its program is fenced first: it stays there until the epoch begins. Otherwise new members could
become the majority of an epoch in which a step is still to be settled, and settle it in another way. The fence stays if
the epoch is not accepted, so this peer then takes part in no earlier one either (`Voter.pass_over`). A peer that copied
the state (a *learner*) respects the epoch that it copied from (`Voter.learn`): alone, its copy is no run.

Copies. A member that copies another state gives up its own (`Votes.copied_at`), for example because two runs of one
name have met. It still counts in the majorities of its earlier epochs, but it holds nothing of them any more. An epoch
whose holders have all given up its state has no successor: its lineage has ended, even if members of still earlier
epochs, which are behind, are there.

Witnesses. A witness is a member that votes and has no state: it breaks the tie of two machines. It counts in a
majority, but it never leads and never wins a tie, and a group needs a holder of the state of every epoch that it
follows. So if a member has applied a step, each lawful successor has a member that holds the step's result. An epoch
that adds only witnesses adds no state, so it counts as one that shrinks. A lineage whose holders have all ended has
ended, whatever witnesses are left of it.

Restarts. A process takes over the votes of earlier processes of its machine, as doubts (`Voter.recall`). So a machine
that was a member begins a new lineage only when each member of the last epoch it knows is present or departed, or when
a person excludes the others (*without*).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from ringfort.cluster.core.peer_messages import MAX_DOUBTS, MAX_LINEAGES, Epoch, Member, Propose, RunState, Votes

MAX_RECALLED: Final = MAX_DOUBTS // 2
"""The latest epochs of earlier processes that a new one takes over. The rest of MAX_DOUBTS is for its own."""

Policy = Literal["majority", "stop", "continue"]
CopiedAt = Mapping[str, int]
"""`Votes.copied_at` of the members of a group, by its own word."""
NOTHING_COPIED: Final[CopiedAt] = {}


def is_lawful(
    group: Collection[str], epoch: Epoch, dead: Collection[str], policy: Policy, copied_at: CopiedAt = NOTHING_COPIED
) -> bool:
    """Return whether `group` may follow `epoch`: it contains a holder of its state and more than half of its living
    members, or exactly half and the lowest id among the holders. Peers in `group` are alive, whatever `dead` says."""
    if not epoch.lineages or policy == "continue" or is_extinct(epoch, group, dead, copied_at):
        return True
    rest = [peer for peer in epoch.peers if peer in group or peer not in dead]
    kept = sum(peer in group for peer in rest)
    if policy == "stop":
        return kept == len(rest)
    holders = sorted(peer for peer in epoch.holders if peer in rest)
    # Without a holder, witnesses and new members could settle a step again that a holder elsewhere has applied.
    if not any(peer in group and copied_at.get(peer, 0) <= epoch.number for peer in holders):
        return False
    return 2 * kept > len(rest) or (2 * kept == len(rest) and holders[0] in group)


def is_extinct(
    epoch: Epoch, group: Collection[str], dead: Collection[str], copied_at: CopiedAt = NOTHING_COPIED
) -> bool:
    """Return whether no peer is left that could be at work in `epoch`. A witness does no work, and neither does a
    member that has given up the state."""
    return all((peer in dead and peer not in group) or copied_at.get(peer, 0) > epoch.number for peer in epoch.holders)


def heritage(
    formed: Iterable[Epoch], group: Collection[str], dead: Collection[str], copied_at: CopiedAt = NOTHING_COPIED
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the lineages that an epoch of `group` continues when it follows `formed`, oldest first, and those that
    have ended. Lineages of doubts do not count: a doubt that was never committed joined nothing, and a group that
    follows it must not stand for lineages that continued without it."""
    formed = tuple(formed)
    alive = (epoch for epoch in formed if not is_extinct(epoch, group, dead, copied_at))
    lineages = tuple(dict.fromkeys(lineage for epoch in alive for lineage in epoch.lineages))[-MAX_LINEAGES:]
    ended = dict.fromkeys(
        lineage for epoch in formed for lineage in (*epoch.ended, *epoch.lineages) if lineage not in lineages
    )
    return lineages, tuple(ended)[-MAX_LINEAGES:]


def is_covered(record: Epoch, formed: Iterable[Epoch]) -> bool:
    """Return whether committed epochs have followed all lineages of `record`, so that it can be forgotten."""
    later = [epoch for epoch in formed if epoch.number >= record.number]
    return all(
        any(lineage in epoch.lineages or lineage in epoch.ended for epoch in later) for lineage in record.lineages
    )


def promised_by(peer: str, votes: Votes) -> Votes:
    """Return `votes` without those that `peer` took over from earlier processes of its machine, which have files
    too."""
    return replace(votes, doubts=tuple(d for d in votes.doubts if peer in d.peers))


def is_binding(votes: Votes) -> bool:
    """Return whether another peer could be split from one with these votes."""
    return any(record.lineages for record in votes.records)


@dataclass(frozen=True)
class Basis:
    """The epochs that a new epoch follows."""

    formed: tuple[Epoch, ...] = ()
    doubts: tuple[Epoch, ...] = ()
    highest: int = 0

    @property
    def records(self) -> tuple[Epoch, ...]:
        """The epochs of which a group needs a majority."""
        return self.formed + self.doubts


def basis_of(all_votes: Iterable[Votes], answering: Collection[str]) -> Basis:
    """Return the last committed epoch of each lineage, and the later doubts, in `all_votes`.

    An epoch is first committed by the leader that proposed it. So a doubt can be dropped if that leader is among those
    `answering`: members of the new epoch, which commit nothing older once they have accepted it, and departed peers,
    which commit nothing at all. If the epoch had been committed, it would be in that leader's own votes.
    """
    all_votes = tuple(all_votes)
    formed = {s.formed.key: s.formed for s in all_votes if s.formed is not None and s.formed.lineages}
    last = [e for e in formed.values() if not is_covered(e, (o for o in formed.values() if o.key != e.key))]
    doubts = {
        d.key: d
        for s in all_votes
        for d in s.doubts
        if d.lineages and d.leader not in answering and d.key not in formed and not is_covered(d, last)
    }
    return Basis(
        tuple(sorted(last, key=_by_key)),
        tuple(sorted(doubts.values(), key=_by_key)),
        max((s.highest for s in all_votes), default=0),
    )


def _by_key(epoch: Epoch) -> tuple[int, str]:
    return epoch.key


@dataclass
class Voter:
    """One peer's votes, and the epoch that it is in."""

    me: str
    policy: Policy = "majority"
    votes: Votes = field(default_factory=Votes)
    current: Epoch | None = None
    learned: Epoch | None = None
    """The epoch that it has copied a state from, if only that copy binds it to the epoch."""

    def objection(self, proposal: Propose) -> str | None:
        """Return why `proposal` must not be accepted, or None. Each member enforces every rule of this module here, so
        that a leader that is wrong or knows too little does no harm."""
        epoch = proposal.epoch
        peers = set(epoch.peers)
        if epoch.number <= self.votes.highest:
            return f"number {epoch.number} is not above {self.votes.highest}"
        if self.me not in peers or len(peers) != len(epoch.members) or epoch.leader not in epoch.holders:
            return "its members do not include the leader and this peer, or are not distinct"
        if epoch.peers[: len(epoch.holders)] != epoch.holders:
            return "its witnesses are not its last members"  # ranks are places among the members
        if len(peers) > 1 and not epoch.lineages:
            return "it has no lineage"
        if len(self._left_over(proposal)) >= MAX_DOUBTS:
            return "too many epochs are in doubt"
        for record in self.votes.records:
            if not self._is_known(record, proposal):
                return f"it does not know of epoch {record.number}"
        copied_at = {peer: number for peer, number in proposal.copied_at if peer in peers}
        if copied_at.get(self.me, 0) != self.votes.copied_at:
            return "it does not know which state I have given up"
        dead = {*proposal.departed, *proposal.without}
        lineages, ended = heritage(proposal.formed, peers, dead, copied_at)
        if not set(lineages) <= set(epoch.lineages):
            return "it forgets a lineage"
        if not set(ended).isdisjoint(epoch.lineages):
            return "it continues a lineage that has no living member"
        if not set(epoch.ended) <= set(ended):
            return "it ends a lineage that may have living members"
        for record in proposal.formed + proposal.doubts:
            if not is_lawful(peers, record, dead, self.policy, copied_at):
                return f"it lacks the majority of epoch {record.number}, or a holder of its state"
        return None

    def state_objection(self, proposal: Propose, state: RunState) -> str | None:
        """Return why a member of an elastic run, fenced at `state`, must not accept `proposal`, or None."""
        epoch, at = proposal.epoch, proposal.at
        if state.lineage and state.lineage not in epoch.lineages:
            return "my run is of another lineage, which may have living members"
        if at is None:
            formed = self.votes.formed
            if self.is_learner or formed is None or not set(epoch.holders) <= set(formed.holders):
                return "it adds members and does not say at which step"
        elif state.is_pending:
            return f"I hold the result of step {state.step + 1}, which comes first"
        elif state.mark != at.mark:
            return f"I am at step {state.step}, not at step {at.step}, or have another state"
        return None

    def _is_known(self, record: Epoch, proposal: Propose) -> bool:
        answering = {*proposal.epoch.peers, *proposal.departed}
        return (
            not record.lineages
            or record in proposal.formed
            or record in proposal.doubts
            or is_covered(record, proposal.formed)
            or (record in self.votes.doubts and record.leader in answering)
        )

    def _left_over(self, proposal: Propose) -> tuple[Epoch, ...]:
        """Return the doubts that remain: the leader has abandoned what it proposed to this peer before, or committed
        it: then this peer still has to hear that, or it would not know its own last epoch."""
        leader, formed = proposal.epoch.leader, proposal.formed
        return tuple(d for d in self.votes.doubts if d.leader != leader or self.me not in d.peers or d in formed)

    def recall(self, all_votes: Iterable[Votes]) -> None:
        """Take over the votes of earlier processes of this machine, before this one casts any."""
        basis = basis_of(all_votes, ())
        recalled = tuple(sorted(basis.records, key=_by_key)[-MAX_RECALLED:])
        mine = self.votes
        self.votes = replace(mine, highest=max(basis.highest, mine.highest), doubts=recalled + mine.doubts)

    def learn(self, epoch: Epoch) -> None:
        """Respect `epoch`, whose state this peer copies as a learner: with its copy it founds nothing beside it."""
        others = tuple(doubt for doubt in self.votes.doubts if doubt != self.learned)  # that copy is gone
        self.learned = None if epoch in others else epoch
        doubts = others if self.learned is None else (*others, epoch)
        # Above what it has accepted: an epoch that is committed late must not find it with another state.
        number = max(self.votes.highest + 1, epoch.number)
        self.votes = Votes(number, self.votes.formed, doubts[-MAX_DOUBTS:], number)

    @property
    def is_learner(self) -> bool:
        """Whether its state is a copy with which no epoch has seated it yet: then it may only be in an epoch that all
        members enter with the same state."""
        return self.votes.copied_at > (0 if self.votes.formed is None else self.votes.formed.number)

    def has_given_up(self, epoch: Epoch) -> bool:
        """Whether it has copied a state since it accepted `epoch`. It is never in that epoch then, and its members may
        need it: it copies their state again, if there is no later epoch."""
        return self.votes.copied_at > epoch.number

    def accepting(self, proposal: Propose) -> Votes:
        """Return the votes of this peer after it accepts `proposal`."""
        doubts = (*self._left_over(proposal), proposal.epoch)
        return replace(self.votes, highest=proposal.epoch.number, doubts=doubts)

    def accept(self, proposal: Propose) -> Epoch | None:
        """Accept `proposal`. Return the epoch that this peer was in until now."""
        left, self.current = self.current, None
        self.votes = self.accepting(proposal)
        return left

    def pass_over(self, number: int) -> None:
        """Take part in no epoch up to `number`, which this peer does not accept: its program is fenced for it already,
        and would do nothing in an earlier one."""
        self.votes = replace(self.votes, highest=max(self.votes.highest, number))

    def abandon(self, pending: Collection[Epoch | None]) -> None:
        """Forget what this peer itself proposed and has not committed, except `pending`. It can commit nothing of that
        after this: it commits only what is in its doubts, and accepts only numbers above `Votes.highest`. Forgetting
        need not be on the disk: a file with more doubts only makes others more careful. (A file in which it is
        committed does not: `Epochs` keeps one pending of which it cannot know that.)"""
        formed = 0 if self.votes.formed is None else self.votes.formed.number
        mine = [d for d in self.votes.doubts if d.leader == self.me and d.number > formed and d not in pending]
        if mine:
            self.votes = replace(self.votes, doubts=tuple(d for d in self.votes.doubts if d not in mine))

    def hear(self, peer: str, votes: Votes) -> None:
        """Forget the doubts that these votes of `peer` show to be abandoned."""
        abandoned = [d for d in self.votes.doubts if d.leader == peer and _is_abandoned(d, votes)]
        if abandoned:
            self.votes = replace(self.votes, doubts=tuple(d for d in self.votes.doubts if d not in abandoned))

    def committing(self, key: tuple[int, str]) -> Votes:
        """Return the votes of this peer after the epoch of `key` is committed. An epoch from before the last committed
        one stays a doubt: this peer copied its state since, and would forget whom the later one binds it to. So
        `Votes.formed` never goes back, and shows for ever whether something up to its number may have been committed.
        """
        formed = 0 if self.votes.formed is None else self.votes.formed.number
        mine = (doubt for doubt in self.votes.doubts if self.me in doubt.peers and doubt.number > formed)
        epoch = next((doubt for doubt in mine if doubt.key == key), None)
        if epoch is None:
            return self.votes
        later = tuple(doubt for doubt in self.votes.doubts if doubt.number > epoch.number)
        return replace(self.votes, formed=epoch, doubts=later)

    def commit(self, key: tuple[int, str]) -> Epoch | None:
        """Commit the epoch of `key`, which all members have accepted. Return it if this peer is in it from now on."""
        before, self.votes = self.votes, self.committing(key)
        epoch = self.votes.formed
        if self.votes is before or epoch is None:
            return None
        if self.votes.doubts or self.votes.highest != epoch.number:
            return None  # it has accepted a later one, and is in no epoch until that is committed
        self.current = epoch
        return epoch

    def leave(self) -> Epoch | None:
        """Leave the current epoch and return it. The votes stay."""
        left, self.current = self.current, None
        return left


def _is_abandoned(doubt: Epoch, votes: Votes) -> bool:
    """Return whether the leader of `doubt`, which has these votes, has not committed it and never will."""
    if votes.highest < doubt.number or doubt in votes.doubts:
        return False  # it may still accept or commit it
    # Otherwise it may have committed it, and then a later one. A state that it has copied says nothing about that: its
    # last committed epoch stays in its votes.
    return votes.formed is None or votes.formed.number < doubt.number


def largest_lawful(
    group: Sequence[str],
    all_votes: Mapping[str, Votes],
    departed: Mapping[str, Votes],
    without: Collection[str],
    policy: Policy,
) -> tuple[list[str], Basis]:
    """Return the peers of `group` that may form an epoch, and the basis of that epoch.

    A peer that holds a record of which the group has no majority must wait; the others are examined again without it.
    """
    peers = list(group)
    dead = {*departed, *without}
    while True:
        # Not `without`: the votes of those peers are unknown, so they answer for nothing.
        basis = basis_of(_with_the_departed((all_votes[p] for p in peers), departed), {*peers, *departed})
        copied_at = copied_by(all_votes, peers)
        broken = {r.key for r in basis.records if not is_lawful(peers, r, dead, policy, copied_at)}
        if not broken:
            return peers, basis
        held = [p for p in peers if broken.isdisjoint(r.key for r in known_to(all_votes[p], departed))]
        if len(held) == len(peers):
            return [], basis
        peers = held


def copied_by(all_votes: Mapping[str, Votes], group: Iterable[str]) -> dict[str, int]:
    """Return `Votes.copied_at` of those in `group` that have copied a state."""
    return {peer: all_votes[peer].copied_at for peer in group if all_votes[peer].copied_at}


def unlawful(
    group: Collection[str],
    votes: Votes,
    departed: Mapping[str, Votes],
    without: Collection[str],
    policy: Policy,
) -> list[Epoch]:
    """Return the epochs that bind a peer with these votes and of which `group` has no majority."""
    basis = basis_of(_with_the_departed([votes], departed), {*group, *departed})
    dead = {*departed, *without}
    return [record for record in basis.records if not is_lawful(group, record, dead, policy)]


def known_to(votes: Votes, departed: Mapping[str, Votes]) -> list[Epoch]:
    """Return the epochs in `votes`, and those in the last votes of departed members of them."""
    return [record for one in _with_the_departed([votes], departed) for record in one.records]


def _with_the_departed(all_votes: Iterable[Votes], departed: Mapping[str, Votes]) -> list[Votes]:
    """Return `all_votes` and, transitively, the last votes of departed members of their epochs."""
    found: list[Votes] = []
    asked: set[str] = set()
    to_ask = list(all_votes)
    while to_ask:
        votes = to_ask.pop()
        found.append(votes)
        mates = {mate for record in votes.records for mate in record.peers}
        to_ask += [departed[mate] for mate in sorted(mates) if mate in departed and mate not in asked]
        asked |= mates & departed.keys()
    return found


def seat(before: Epoch | None, members: Mapping[str, Member], number: int) -> tuple[Member, ...]:
    """Return `members` in order. Members of `before` keep their index if it still exists. The gaps are filled by
    members whose index is gone, and then by new peers, sorted by host and id. Witnesses come last."""
    old = {} if before is None else {m.peer: (i, m.joined) for i, m in enumerate(before.members) if m.peer in members}
    seats: list[Member | None] = [None] * sum(member.slots > 0 for member in members.values())
    moved: list[Member] = []
    witnesses = [m for m in members.values() if not m.slots]
    for peer, (place, joined) in old.items():
        member = _since(members[peer], joined)
        if not member.slots:
            continue
        if place < len(seats):
            seats[place] = member
        else:
            moved.append(member)
    new = sorted((m for p, m in members.items() if p not in old and m.slots), key=lambda m: (m.host, m.peer))
    queue = [*moved, *(_since(member, number) for member in new)]
    last = (_since(m, old[m.peer][1] if m.peer in old else number) for m in sorted(witnesses, key=lambda m: m.peer))
    return (*(queue.pop(0) if member is None else member for member in seats), *last)


def _since(member: Member, joined: int) -> Member:
    return msgspec.structs.replace(member, joined=joined)
