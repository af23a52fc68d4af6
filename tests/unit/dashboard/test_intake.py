"""What a viewer takes from the cluster, and what it does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ringfort.cluster.core.events import Misbehaved, Noted, PeerLost
from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.topology import ClusterTopology, ConnectionProfile, NodeProfile
from ringfort.cluster.view import PeerView
from ringfort.dashboard.intake import BURST, GONE, LOCAL_FIRST, MAX_PROCESSES, RATE, Intake, links_of
from ringfort.dashboard.known import AnyFrame, Ended, Happened, Known, Printed, Reported, Unreadable
from ringfort.telemetry.records import Event, Header, Values
from ringfort.telemetry.report import Report, Sums, encode
from ringfort.telemetry.view import LinkView
from ringfort.telemetry.watching import LOG, REPORT, LogPart, encode as encode_log


class Viewer:
    """An intake in virtual time, and the frames that it makes."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.frames: list[AnyFrame] = []
        self.known = Known(lambda: self.now)
        self.intake = Intake(self._feed)
        self.meet()

    def _feed(self, frame: AnyFrame, at: float) -> None:
        self.frames.append(frame)
        self.known.take(frame, at)

    def meet(self, *peers: str, **changes: Any) -> None:
        """These are connected now. The machine of `a.1` is `a`."""
        views = [PeerView(peer=peer, name=peer[0], host=peer[0], **changes) for peer in peers]
        self.intake.set_peers([PeerView(peer="me.1", host="me", slots=0, is_self=True), *views], self.now)

    def note(self, peer: str, body: bytes, topic: str = REPORT) -> None:
        self.intake.take_event(Noted(peer, topic, body), self.now)

    def take(self, kind: type[Any]) -> list[Any]:
        """The frames of a kind so far, which are forgotten."""
        found = [frame for frame in self.frames if isinstance(frame, kind)]
        self.frames = [frame for frame in self.frames if not isinstance(frame, kind)]
        return found

    def events(self) -> list[tuple[str, str]]:
        return [(frame.event.kind, frame.event.text) for frame in self.take(Happened)]

    def states(self) -> dict[int, str]:
        return {rank.rank: rank.state for rank in self.known.history.view(now=self.now).ranks}


def report(pid: int = 1, rank: int = 0, **changes: Any) -> Report:
    return Report(Header(pid, 900.0, rank, 2, program="train.py"), 1000.0, sums=Sums(1, 0.1), **changes)


@pytest.fixture
def viewer() -> Viewer:
    return Viewer()


def test_a_peer_is_believed_about_its_ranks_but_not_about_its_machine(viewer: Viewer) -> None:
    viewer.meet("a.1")
    viewer.note("a.1", encode(report(host="b", name="b")))
    (frame,) = viewer.take(Reported)
    assert (frame.report.host, frame.report.name) == ("a", "a")
    viewer.note("stranger", encode(report()))
    assert viewer.take(Reported) == []


def test_who_comes_and_goes_becomes_an_event_but_viewers_do_not(viewer: Viewer) -> None:
    viewer.meet("a.1")
    assert viewer.events() == [("joined", "a is here")]
    viewer.meet("a.1", "v.1", slots=0)
    assert viewer.events() == []
    viewer.note("a.1", encode(report(pid=1)))
    viewer.note("a.1", encode(report(pid=2, rank=1)))
    viewer.intake.take_event(PeerLost("v.1", "it left", died=True, left=True), viewer.now)
    assert viewer.events() == []
    viewer.intake.take_event(PeerLost("a.1", "its process has ended", died=True), viewer.now)
    assert viewer.events() == [("lost", "a is gone: its process has ended")]
    assert viewer.take(Ended) == [Ended("a", 1), Ended("a", 2)]
    assert viewer.states() == {0: "lost", 1: "lost"}


def test_a_peer_that_is_out_of_reach_has_not_ended(viewer: Viewer) -> None:
    viewer.meet("a.1")
    viewer.note("a.1", encode(report()))
    viewer.take(Happened)
    viewer.intake.take_event(PeerLost("a.1", "silent for 2.0 s", died=False), viewer.now)
    assert viewer.events() == [("lost", "a is out of reach: silent for 2.0 s")]
    assert viewer.take(Ended) == []
    viewer.now += 60
    assert viewer.states() == {0: "silent"}


def test_a_loss_that_is_told_after_the_peer_has_vanished_still_ends_its_ranks(viewer: Viewer) -> None:
    viewer.meet("a.1")
    viewer.note("a.1", encode(report()))
    viewer.meet()
    viewer.intake.take_event(PeerLost("a.1", "it left", died=True, left=True), viewer.now)
    assert viewer.take(Ended) == [Ended("a", 1, left=True)]
    assert viewer.states() == {0: "ended"}
    assert viewer.events()[-1] == ("left", "a has left: it left")


def test_a_rank_that_has_moved_is_that_of_its_new_machine(viewer: Viewer) -> None:
    viewer.meet("a.1", "b.1")
    viewer.note("a.1", encode(report(pid=1, rank=3)))
    viewer.note("b.1", encode(report(pid=2, rank=3)))
    viewer.now += 1
    viewer.note("a.1", encode(report(pid=1, rank=3, is_alive=False)))
    assert viewer.intake.peer_of("train.py", 3) == "b.1"
    viewer.note("b.1", encode(report(pid=2, rank=3, is_alive=False)))
    viewer.now += 1
    viewer.note("a.1", encode(report(pid=5, rank=3)))  # it has come back, after another process that had ended
    assert viewer.intake.peer_of("train.py", 3) == "a.1"
    viewer.now += 1
    viewer.note("a.1", encode(report(pid=5, rank=3, is_alive=False)))
    assert viewer.intake.peer_of("train.py", 3) == "a.1"  # its output says why it has ended


def test_a_peer_whose_processes_come_and_go_is_never_full(viewer: Viewer) -> None:
    viewer.meet("a.1")
    for pid in range(2 * MAX_PROCESSES):
        for is_alive in (True, False):
            viewer.now += 1.0
            viewer.note("a.1", encode(report(pid=pid, is_alive=is_alive)))
    assert len(viewer.take(Reported)) == 4 * MAX_PROCESSES
    assert len(viewer.intake._peers["a.1"].processes) == MAX_PROCESSES  # type: ignore[index]


def test_peers_that_vanish_without_a_word_are_forgotten(viewer: Viewer) -> None:
    for number in range(100):
        viewer.meet(f"a.{number}")
        viewer.now += GONE / 2
    assert len(viewer.intake._peers or {}) <= 3


def test_a_peer_that_sends_nonsense_is_marked_and_recovers(viewer: Viewer) -> None:
    viewer.meet("a.1")
    viewer.note("a.1", encode(report()))
    assert viewer.states() == {0: "training"}
    for body in (
        b"",
        b"\xc1" * 100,
        b"x" * 3000,
        encode(report(received=float("nan"))),
        encode(report(sent={1: -1.0})),
    ):
        viewer.note("a.1", body)
        assert viewer.take(Unreadable) == [Unreadable("a", "a")]
        assert viewer.states() == {0: "nonsense"}
        assert "cannot be read" in viewer.known.history.view().notice
        viewer.note("a.1", encode(report()))
        assert viewer.states() == {0: "training"}
        assert viewer.known.history.view().notice == ""


def test_a_flood_of_notes_is_dropped_and_grows_nothing(viewer: Viewer) -> None:
    viewer.meet("a.1", "b.1")
    bodies = [encode(report(pid=pid)) for pid in range(1000)]
    viewer.note("b.1", encode(report(pid=5, rank=1)))
    viewer.take(Reported)
    viewer.take(Happened)
    seconds = 10
    for number in range(seconds * 10_000):
        viewer.now = 1000.0 + number / 10_000
        viewer.note("a.1", bodies[number % 1000])
        if number % 10_000 == 0:
            viewer.note("b.1", encode(report(pid=5, rank=1)))
    taken = viewer.take(Reported)
    assert sum(frame.report.host == "a" for frame in taken) <= BURST + RATE * seconds
    assert sum(frame.report.host == "b" for frame in taken) == seconds  # the others are still heard
    assert viewer.events() == [("dropped", "a sends more than 20 notes a second; most are dropped")]
    assert len(viewer.intake._peers["a.1"].processes) <= MAX_PROCESSES  # type: ignore[index]


def test_a_peer_with_very_many_processes_is_bounded(viewer: Viewer) -> None:
    viewer.meet("a.1")
    for pid in range(2 * MAX_PROCESSES):
        viewer.now += 1.0
        viewer.note("a.1", encode(report(pid=pid)))
    assert len(viewer.take(Reported)) == MAX_PROCESSES


def test_a_rank_that_is_seen_here_and_over_the_network_counts_once(viewer: Viewer) -> None:
    views = [PeerView(peer="me.1", host="me", is_self=True), PeerView(peer="me.2", host="me", name="me")]
    for second in range(10):
        viewer.now += 1.0
        viewer.intake.set_peers(views, viewer.now)
        viewer.note("me.2", encode(report(pid=7)))
        if second:  # it is seen here a little later
            viewer.intake.take_local([report(pid=7, host="me")], viewer.now)
    assert len(viewer.take(Reported)) == 9
    assert viewer.states() == {0: "training"}
    viewer.intake.take_event(PeerLost("me.2", "it left", died=True, left=True), viewer.now)
    assert viewer.take(Ended) == []  # the trace says whether it lives


def test_a_rank_of_this_machine_whose_trace_cannot_be_read_is_seen_over_the_network(viewer: Viewer) -> None:
    viewer.intake.set_peers([PeerView(peer="me.1", host="me", is_self=True)], viewer.now)
    other = PeerView(peer="me.2", host="me", name="me")
    for _ in range(6):
        viewer.intake.set_peers([PeerView(peer="me.1", host="me", is_self=True), other], viewer.now)
        viewer.note("me.2", encode(report(pid=7)))
        viewer.now += 1.0
    assert len(viewer.take(Reported)) == 6 - LOCAL_FIRST


def test_output_is_taken_only_if_it_was_asked_for(viewer: Viewer) -> None:
    viewer.meet("a.1", "b.1")
    viewer.note("a.1", encode(report(rank=3)))
    part = encode_log(LogPart(3, 1, 0, b"hello\n"))
    viewer.note("a.1", part, LOG)
    assert viewer.take(Printed) == []
    viewer.intake.wanted = frozenset({("train.py", 3)})
    viewer.note("b.1", part, LOG)  # it has no such rank
    assert viewer.take(Printed) == []
    viewer.note("a.1", part, LOG)
    assert viewer.known.output("train.py", 3).lines() == ["hello"]
    assert viewer.intake.peer_of("train.py", 3) == "a.1"
    assert viewer.intake.peer_of("train.py", 4) is None
    viewer.note("a.1", b"\xc1", LOG)
    assert viewer.take(Unreadable) == [Unreadable("a", "a")]


def test_texts_of_peers_contain_no_control_characters(viewer: Viewer) -> None:
    views = [PeerView(peer="a.1", name="a\x1b[31m", host="a")]
    viewer.intake.set_peers(views, viewer.now)
    bad = report(events=(Event(1.0, "e\x07", "text\x1b[0m\n"),), values=(Values(1, 1.0, {"lo\x00ss": 1.0}),))
    bad = msgspec.structs.replace(bad, header=Header(1, 900.0, 0, program="p\x1b", run="r\n"))
    viewer.note("a.1", encode(bad))
    viewer.intake.take_event(Misbehaved("a.1", "it floods\x1bus"), viewer.now)
    viewer.intake.set_refusals(["refused\x07: why"], viewer.now)
    view = viewer.known.history.view(now=viewer.now)
    texts = [view.run, view.program, *(rank.name for rank in view.ranks), *(curve.name for curve in view.curves)]
    texts += [text for event in view.events for text in (event.kind, event.text, event.name)]
    assert len(view.events) == 3
    assert all(text.isprintable() for text in texts), texts


def test_a_refused_connection_is_told_once(viewer: Viewer) -> None:
    for _ in range(3):
        viewer.intake.set_refusals(["10.0.0.9: another cluster"], viewer.now)
    viewer.intake.set_refusals(["10.0.0.9: another cluster", "10.0.0.8: too many"], viewer.now)
    assert viewer.events() == [("refused", "10.0.0.9: another cluster"), ("refused", "10.0.0.8: too many")]


def test_links_join_machines_in_both_directions_by_their_fastest_path() -> None:
    topology = ClusterTopology()
    for peer, host in (("a1", "A"), ("a2", "A"), ("b1", "B"), ("c1", "C")):
        topology.add(NodeProfile(peer=peer, host=host), 0.0)
    wifi = ConnectionProfile(kind=LinkKind.WIFI, latency=0.002, bandwidth_out=10e6, bandwidth_in=8e6)
    topology.connect("a1", "b1", wifi)
    topology.connect("a2", "b1", ConnectionProfile(kind=LinkKind.ETHERNET, bandwidth_out=100e6, bandwidth_in=5e6))
    topology.connect("a1", "a2", ConnectionProfile(bandwidth_out=1e9))
    assert links_of(topology) == (
        LinkView("A", "B", 0.0, 100e6, None, "Ethernet"),
        LinkView("B", "A", 0.0, 8e6, 0.004, "Wi-Fi"),
    )
