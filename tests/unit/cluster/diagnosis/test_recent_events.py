"""What a node keeps of past events, for the message when it is alone."""

from __future__ import annotations

from ringfort.cluster.core.events import EpochStarted, Misbehaved, PeerJoined, PeerLost, Waiting
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.diagnosis.recent_events import MAX_EVENTS, RecentEvents


def test_a_lost_peer_is_known_by_its_name_until_it_is_back() -> None:
    recent = RecentEvents()
    recent.add(PeerJoined("n.a", "study"))
    recent.add(PeerLost("n.a", "silent for 2.0 s", died=False))
    recent.add(PeerLost("n.b", "it left", died=True))
    assert list(recent.lost.values()) == ["study (silent for 2.0 s)", "n.b (it left)"]
    recent.add(PeerJoined("n.a", "study"))
    assert list(recent.lost) == ["n.b"]


def test_only_the_latest_losses_are_kept() -> None:
    recent = RecentEvents()
    for number in range(2 * MAX_EVENTS):
        recent.add(PeerLost(f"n.{number}", "it left", died=True))
    assert list(recent.lost) == [f"n.{number}" for number in range(MAX_EVENTS, 2 * MAX_EVENTS)]


def test_a_repeated_refusal_does_not_push_out_the_others() -> None:
    recent = RecentEvents()
    for peer in ("one.1", *["two.1"] * 100):
        recent.add(Misbehaved(peer, "it floods"))
    assert list(recent.refused) == ["one.1 was refused: it floods", "two.1 was refused: it floods"]


def test_an_epoch_ends_the_waiting() -> None:
    recent = RecentEvents()
    recent.add(Waiting("1 of at least 2 other peers are here"))
    assert recent.waiting_for.startswith("1 of at least 2")
    recent.add(EpochStarted(Epoch(1, "n.a", (Member("n.a"),))))
    assert recent.waiting_for == ""
