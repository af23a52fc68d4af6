"""`ShownEvents`: what happens in a cluster, in short sentences for those who watch a run. Pure.

All members find the same words for the same event: viewers show it once.
"""

from __future__ import annotations

from collections.abc import Iterator

from ringfort.cluster.core import events
from ringfort.cluster.core.peer_messages import Epoch

Shown = tuple[str, str]
"""The kind of an event, and a sentence."""


def names_of(epoch: Epoch) -> dict[str, str]:
    """Return the name of each member, by peer id: that of its machine, and where that is not unique, its process."""
    members = [member for member in epoch.members if member.slots]  # a witness takes no part in the steps
    names = [member.name or member.peer for member in members]
    return {
        member.peer: name if names.count(name) == 1 else f"{name}/{member.peer.rpartition('.')[2][:6]}"
        for member, name in zip(members, names, strict=True)
    }


class ShownEvents:
    """The events of one peer. Feed it all of them, in order."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        """The members of the latest epoch."""
        self._leader = ""

    def take(self, event: events.ClusterEvent) -> Iterator[Shown]:
        """Yield what is to be shown of an event."""
        match event:
            case events.EpochStarted(epoch=epoch):
                yield from self._began(epoch)
            case events.PeerLost(peer=peer, why=why, left=left) if peer in self._names:
                kind, what = ("left", "has left") if left else ("lost", "is lost")
                yield kind, f"{self._names.pop(peer)} {what}: {why}"
            case events.ConnectionRefused() | events.Misbehaved() | events.CloneFound():
                yield "refused", str(event)
            case events.DiskTrouble() | events.ControlLost():
                yield "trouble", str(event)
            case _:
                pass

    def _began(self, epoch: Epoch) -> Iterator[Shown]:
        before, self._names = self._names, names_of(epoch)
        if before or self._leader:
            for peer, name in self._names.items():
                if peer not in before:
                    yield "joined", f"{name} has joined"
        yield "epoch", f"Epoch {epoch.number} has begun: {', '.join(self._names.values())}"
        leader = self._names.get(epoch.leader, "a witness")
        if self._leader not in ("", leader):
            yield "leader", f"{leader} leads the cluster now"
        self._leader = leader
