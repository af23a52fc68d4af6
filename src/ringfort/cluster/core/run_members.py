"""`run_members`: which peers of an elastic run may be in the next epoch, and where all of them must be. Pure.

A leader decides by it what to propose. It is no law: each member checks a proposal by itself (membership.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from ringfort.cluster.core.membership import Policy, copied_by, heritage, largest_lawful
from ringfort.cluster.core.peer_messages import Report, RunState, Votes


class Evidence(NamedTuple):
    """What a leader knows of peers that it does not see, and how it takes that."""

    departed: Mapping[str, Votes]
    without: Collection[str] = ()
    policy: Policy = "majority"


def run_members(
    me: str, reports: Mapping[str, Report], witnesses: Collection[str], evidence: Evidence
) -> tuple[list[str], RunState | None]:
    """Return those of the peers with these `reports` that may be in the next epoch that `me` leads, and where all of
    them must be: at a new beginning, if no run is alive that they know of; where `me` is, if all members of its last
    epoch are there; anywhere, if the epoch only shrinks. Witnesses are in all of them: they have no state."""
    told = {
        peer: report.state for peer, report in reports.items() if peer not in witnesses and report.state is not None
    }
    votes = {peer: reports[peer].votes for peer in (*told, *witnesses)}
    _, basis = largest_lawful(tuple(votes), votes, evidence.departed, evidence.without, evidence.policy)
    dead = {*evidence.departed, *evidence.without}
    lineages, ended = heritage(basis.formed, votes, dead, copied_by(votes, votes))
    states = {peer: _in_run(state, votes[peer], lineages, ended) for peer, state in told.items()}
    if not lineages:
        return [*(peer for peer in states if not states[peer].lineage), *witnesses], RunState()
    mine, formed = states[me], votes[me].formed
    seated = [peer for peer in states if not states[peer].is_learner]
    seats = [(states[p], e) for p in seated if (e := votes[p].formed) and states[p].lineage in e.lineages]
    # Of two runs that have not begun, the one whose first state was sent: the other may be unable to go on alone.
    best, _ = max(seats, key=lambda seat: (seat[0].step, seat[0].is_pending, seat[0].lineage), default=(mine, formed))
    latest = max((e for _, e in seats if mine.lineage in e.lineages), key=lambda e: e.number, default=formed)
    # Two runs have met, and the one with more steps stays; or the run went on without this peer.
    if best.lineage != mine.lineage or (latest is not None and me not in latest.peers):
        return [], None
    # A member that has given its state up is a learner like others: it would accept no epoch that only shrinks.
    old = [p for p in seated if formed and p in formed.peers and states[p].lineage == mine.lineage]
    same = [peer for peer in states if states[peer].mark == mine.mark and not states[peer].is_pending]
    is_broken = _is_broken(me, reports)
    if not is_broken:  # a learner that only follows keeps no other one waiting
        same = [peer for peer in same if peer in old or states[peer].is_ready]
    is_idle = is_broken or all(states[peer].is_ready for peer in same)
    if is_idle and me in same and set(old) <= set(same):
        return [*same, *witnesses], mine
    return [*old, *witnesses], None


def _in_run(state: RunState, votes: Votes, lineages: Collection[str], ended: Collection[str]) -> RunState:
    """Return the state of a peer as it counts. A program gives up the state of a lineage that has ended when it is
    fenced. A member that has no state yet is in the lineage of its epoch: others of them may have founded the run."""
    if state.lineage in ended:
        state = RunState(is_learner=state.is_learner)
    if state.lineage:
        return state
    formed = () if votes.formed is None else votes.formed.lineages
    return replace(state, lineage=next((lineage for lineage in formed if lineage in lineages), ""))


def _is_broken(me: str, reports: Mapping[str, Report]) -> bool:
    """Return whether `me` is in no epoch, or in one that a member has left for good: then a new one disturbs nobody."""
    formed, current = reports[me].votes.formed, reports[me].current
    if not current or formed is None:
        return True
    return any(reports[p].votes.highest > current for p in formed.peers if p in reports)
