"""Which peers a program without a place in its run may copy the state from. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ringfort.cluster.core.membership import Voter
from ringfort.cluster.core.peer_messages import Epoch, Report


class StateSource(msgspec.Struct, frozen=True):
    """A member of the run, and the epoch that it is in."""

    peer: str
    epoch: Epoch


def state_sources(voter: Voter, reports: Mapping[str, Report]) -> tuple[StateSource, ...]:
    """Return the members of the newest epoch of the run that goes on without this peer; none if it does not.

    A member whose epoch has just ended has no source: it holds what the next epoch must settle, and one that copies the
    state of another member gives that up (`Voter.learn`). One that has given it up already copies from the others even
    if their epoch has ended too: they may not go on without this peer. If two runs of one name have met, the members of
    the one with more steps are returned, as far as that is known.
    """
    found: list[tuple[int, Epoch, str]] = []
    for peer, report in sorted(reports.items()):
        epoch, state = report.votes.formed, report.state
        if epoch is None or state is None:
            continue
        needs_me = voter.me in epoch.peers and bool(state.mark) and not state.is_learner
        if (report.current or needs_me) and _goes_on_without(voter, epoch):
            found.append((state.step, epoch, peer))
    if not found:
        return ()
    _, best, _ = max(found, key=lambda one: (one[0], one[1].number))
    same = [(epoch, peer) for _, epoch, peer in found if set(epoch.lineages) & set(best.lineages)]
    newest = max((epoch for epoch, _ in same), key=lambda epoch: epoch.key)
    return tuple([StateSource(peer, epoch) for epoch, peer in same if epoch.key == newest.key])


def _goes_on_without(voter: Voter, epoch: Epoch) -> bool:
    if voter.me in epoch.peers:
        return voter.has_given_up(epoch)
    last = voter.votes.formed
    if last is None or voter.is_learner:
        return True
    return epoch.number > last.number or set(last.lineages).isdisjoint(epoch.lineages)
