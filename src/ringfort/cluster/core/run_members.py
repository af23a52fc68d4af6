"""`run_members`: which peers of an elastic run may be in the next epoch, and where all of them must be. Pure.

A leader decides by it what to propose. It is no law: each member checks a proposal by itself (membership.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from ringfort.cluster.core.membership import Basis, Policy, copied_by, heritage, largest_lawful
from ringfort.cluster.core.peer_messages import Epoch, Report, RunState, Votes


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
    basis = _lawful(votes, votes, evidence)[1]
    dead = {*evidence.departed, *evidence.without}
    lineages, ended = heritage(basis.formed, votes, dead, copied_by(votes, votes))
    states = {peer: _in_run(state, votes[peer], lineages, ended) for peer, state in told.items()}
    if not lineages:
        return [*(peer for peer in states if not states[peer].lineage), *witnesses], RunState()
    seats = {
        p: e for p in states if not states[p].is_learner and (e := votes[p].formed) and states[p].lineage in e.lineages
    }
    if _went_on_without(me, states[me].lineage, seats):
        return [], None
    # Two runs have met, and the one with more steps stays. If it cannot go on with the peers that are there, the other
    # one does not wait for it: a peer of that one may be the only one that can tell that an epoch was never committed.
    for leader in _leaders_of_better_runs(states[me], states, seats):
        if leader in _lawful([*_led_by(leader, states, reports)[0], *witnesses], votes, evidence)[0]:
            return [], None
    group, at = _led_by(me, states, reports)
    return [*group, *witnesses], at


def _lawful(group: Iterable[str], votes: Mapping[str, Votes], evidence: Evidence) -> tuple[list[str], Basis]:
    return largest_lawful(tuple(group), votes, evidence.departed, evidence.without, evidence.policy)


def _went_on_without(peer: str, lineage: str, seats: Mapping[str, Epoch]) -> bool:
    """Return whether the newest epoch of a lineage is without `peer`, which is in that lineage. The epoch may continue
    other lineages too: two runs that had not begun became one."""
    latest = max((e for e in seats.values() if lineage in e.lineages), key=lambda epoch: epoch.number, default=None)
    return latest is not None and peer not in latest.peers


def _leaders_of_better_runs(
    mine: RunState, states: Mapping[str, RunState], seats: Mapping[str, Epoch]
) -> Iterator[str]:
    """Yield those who could lead a run with more steps than that of `mine`. A peer that its run went on without does
    not count: what it holds may be of a lineage that is part of another run now."""
    heads = [peer for peer in seats if not _went_on_without(peer, states[peer].lineage, seats)]
    best = max((_rank(states[p]) for p in heads if states[p].lineage == mine.lineage), default=None)
    for peer in heads:
        if states[peer].lineage != mine.lineage and (best is None or _rank(states[peer]) > best):
            yield peer


def _rank(state: RunState) -> tuple[int, bool, str]:
    """Of two runs that have not begun, the one whose first state was sent is better: the other may be unable to go on
    alone."""
    return state.step, state.is_pending, state.lineage


def _led_by(
    leader: str, states: Mapping[str, RunState], reports: Mapping[str, Report]
) -> tuple[list[str], RunState | None]:
    """Return the peers that a member of a run wants in the next epoch, and where all of them must be."""
    mine, formed = states[leader], reports[leader].votes.formed
    # A member that has given its state up is a learner like others: it would accept no epoch that only shrinks.
    seated = [peer for peer in states if not states[peer].is_learner]
    old = [p for p in seated if formed and p in formed.peers and states[p].lineage == mine.lineage]
    same = [peer for peer in states if states[peer].mark == mine.mark and not states[peer].is_pending]
    is_broken = _is_broken(leader, reports)
    if not is_broken:  # a learner that only follows keeps no other one waiting
        same = [peer for peer in same if peer in old or states[peer].is_ready]
    is_idle = is_broken or all(states[peer].is_ready for peer in same)
    if is_idle and leader in same and set(old) <= set(same):
        return same, mine
    return old, None


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
