"""What is shown of a cluster's events."""

from __future__ import annotations

from ringfort.cluster.core.events import (
    ClusterEvent,
    ConnectionRefused,
    EpochStarted,
    Misbehaved,
    Noted,
    PeerJoined,
    PeerLost,
)
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.shown_events import ShownEvents

ATTIC, BARN, SHED = Member("n.a", name="attic"), Member("n.b", name="barn"), Member("n.c", name="shed")


def shown(*events: ClusterEvent) -> list[tuple[str, str]]:
    found = ShownEvents()
    return [one for event in events for one in found.take(event)]


def test_epochs_say_who_came_who_went_and_who_leads() -> None:
    assert shown(
        PeerJoined("n.a", "attic"),
        EpochStarted(Epoch(1, "n.a", (ATTIC, BARN))),
        PeerLost("n.a", "its process died", died=True),
        PeerLost("n.x", "it was never a member", died=True),
        EpochStarted(Epoch(2, "n.b", (BARN,))),
        EpochStarted(Epoch(3, "n.b", (BARN, SHED))),
        PeerLost("n.c", "it has finished", died=True, left=True),
    ) == [
        ("epoch", "Epoch 1 has begun: attic, barn"),
        ("lost", "attic is lost: its process died"),
        ("epoch", "Epoch 2 has begun: barn"),
        ("leader", "barn leads the cluster now"),
        ("joined", "shed has joined"),
        ("epoch", "Epoch 3 has begun: barn, shed"),
        ("left", "shed has left: it has finished"),
    ]


def test_who_was_refused_is_shown_and_what_programs_say_is_not() -> None:
    found = shown(
        ConnectionRefused("10.0.0.9", "another secret"), Misbehaved("n.b", "nonsense"), Noted("n.b", "t", b"")
    )
    assert found == [
        ("refused", "a connection from 10.0.0.9 was refused: another secret"),
        ("refused", "n.b was refused: nonsense"),
    ]
