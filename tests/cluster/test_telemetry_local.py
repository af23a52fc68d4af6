"""Reports between nodes of one process, on loopback, and views of the runs of this machine."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfort.cluster.core.events import ClusterEvent, Noted
from ringfort.cluster.net import telemetry_sender
from ringfort.cluster.net.service_host import ThreadHost
from ringfort.cluster.net.telemetry_sender import TelemetrySender
from ringfort.cluster.node import ClusterNode
from ringfort.config import AutoDiscoveryConfig
from ringfort.dashboard import source
from ringfort.dashboard.recording import RecordedSource
from ringfort.dashboard.source import LiveSource
from ringfort.errors import ConfigError, InvalidArgumentError
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.telemetry import watching
from ringfort.telemetry.folder import new_folder
from ringfort.telemetry.rank_logs import log_file
from ringfort.telemetry.records import Header, Step
from ringfort.telemetry.report import decode
from ringfort.telemetry.trace_file import TraceWriter
from ringfort.telemetry.watching import LOG, LOGS, REPORT, WATCH, LogRequest, decode_part, encode
from tests.helpers.agents import until

LOCAL = AutoDiscoveryConfig(interfaces=["127.0.0.1"], settle=0.1)
PATIENCE = 20.0


class Rank:
    """A process that trains, as far as its trace tells."""

    def __init__(self, folder: Path, rank: int, pid: int = 0) -> None:
        pid = pid or os.getpid() + rank
        self.writer = TraceWriter(folder / f"{pid}.trace")
        self.writer.describe(Header(pid, time.time(), rank, 2, run="local"))
        self.done = 0

    def step(self) -> None:
        self.done += 1
        self.writer.write(Step(self.done, time.time(), 0.1, samples=8))
        self.writer.set_step(self.done)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    """Two ranks of a launcher on this machine, at which viewers look often."""
    monkeypatch.setattr(source, "REPORT_EVERY", 0.1)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = new_folder()
    made = [Rank(folder, rank) for rank in range(2)]
    yield made
    for rank in made:
        rank.writer.close()


class Pair:
    """A launcher and an observer that are connected, and the notes that their programs get."""

    def __init__(self, folder: Path) -> None:
        namespace = NetworkNamespace.generate("test")
        self.notes: dict[str, queue.Queue[Noted]] = {"launcher": queue.Queue(), "observer": queue.Queue()}
        self.launcher, self.observer = (
            ClusterNode(
                LOCAL,
                slots=slots,
                credentials=Credentials(NodeIdentity.ephemeral(), namespace),
                control="thread",
                telemetry=folder if slots else None,
            )
            for slots in (1, 0)
        )

    def __enter__(self) -> Pair:
        for name, node in (("launcher", self.launcher), ("observer", self.observer)):
            node.subscribe(lambda event, name=name: self._on_event(name, event))
            node.start()
        until(lambda: len(self.observer.snapshot()) == 2, "the nodes to meet")
        return self

    def _on_event(self, name: str, event: ClusterEvent) -> None:
        if isinstance(event, Noted):
            self.notes[name].put(event)

    @property
    def sender(self) -> TelemetrySender:
        host = self.launcher._host
        assert isinstance(host, ThreadHost)
        assert host.service.control is not None
        return host.service.control.telemetry

    def watch(self) -> None:
        self.observer.tell(WATCH, b"")

    def note(self) -> Noted:
        return self.notes["observer"].get(timeout=PATIENCE)

    def __exit__(self, *_: object) -> None:
        self.observer.close()
        self.launcher.close()


def test_reports_are_sent_only_while_somebody_looks(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LEASE", 0.4)
    monkeypatch.setattr(telemetry_sender, "REPORT_EVERY", 0.5)
    with Pair(ranks[0].writer.path.parent) as pair:
        assert not pair.sender._is_running
        assert not pair.sender._traces._open
        assert pair.notes["observer"].empty()
        for rank in ranks:
            rank.step()
        pair.watch()
        notes = [pair.note(), pair.note()]
        found = sorted((decode(note.body) for note in notes), key=lambda report: report.header.rank)
        assert [(report.header.rank, report.step, report.sums.steps) for report in found] == [(0, 1, 1), (1, 1, 1)]
        me = next(view for view in pair.launcher.snapshot() if view.is_self)
        assert {(report.host, report.name) for report in found} == {(me.host, me.name)}
        assert all({"cpu", "memory", "memory_total"} <= report.vitals.keys() for report in found)
        until(lambda: not pair.sender._is_running, "the lease to be over")
        assert not pair.sender._traces._open
        while not pair.notes["observer"].empty():  # a request that arrives twice renews the lease
            assert pair.note().topic == REPORT
        pair.watch()
        assert {pair.note().topic, pair.note().topic} == {REPORT}
        assert pair.notes["launcher"].empty()  # its program has noticed nothing


def test_output_of_a_rank_is_sent_to_a_viewer_that_asks(ranks: list[Rank]) -> None:
    folder = ranks[0].writer.path.parent
    log_file(folder, 1).write_bytes(b"epoch 1\n")
    with Pair(folder) as pair:
        pair.observer.tell(LOGS, encode(LogRequest(1)))  # it does not look yet
        pair.observer.tell(LOGS, b"nonsense")
        pair.watch()
        assert {pair.note().topic, pair.note().topic} == {REPORT}
        pair.observer.tell(LOGS, encode(LogRequest(7)))  # there is no such rank
        pair.observer.tell(LOGS, encode(LogRequest(1)))
        pair.observer.tell(LOGS, encode(LogRequest(1)))  # too soon
        note = pair.note()
        assert (note.topic, decode_part(note.body).data) == (LOG, b"epoch 1\n")
        assert pair.notes["launcher"].empty()


def test_runs_of_this_machine_are_seen_without_a_cluster_and_can_be_recorded(
    ranks: list[Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFORT_KEY", "not a key")
    log_file(ranks[0].writer.path.parent, 1).write_text("\x1b[1mhello\x1b[0m\n")
    path = tmp_path / "recording"
    with LiveSource(LOCAL, record=path) as live:
        for rank in ranks:
            rank.step()
        until(lambda: [rank.step for rank in live.view().ranks] == [1, 1], "both steps to be seen")
        view = live.view()
        assert view.run == "local"
        assert "Only this machine is seen: " in view.notice
        assert {rank.name for rank in view.ranks} != {""}
        assert all(rank.vitals["memory"] > 0 for rank in view.ranks)
        until(lambda: live.log(1) == ["hello"], "the output")
        ranks.pop().writer.close()
        until(lambda: [rank.state for rank in live.view().ranks] == ["training", "lost"], "the end of a rank")
    with RecordedSource(path) as played:
        played.seek(1e9)
        view = played.view()
        assert [rank.state for rank in view.ranks] == ["training", "lost"]
        assert (view.run, view.notice, played.log(1)) == ("local", "", ["hello"])


def test_a_rank_with_a_node_on_this_machine_is_seen_once(
    ranks: list[Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = NetworkNamespace.generate("test").join_code()
    monkeypatch.setenv("RINGFORT_KEY", key)
    folder = ranks[0].writer.path.parent
    with ClusterNode(LOCAL, control="thread", telemetry=folder) as node, LiveSource(LOCAL) as live:
        until(lambda: len(live.view().ranks) == 2, "both ranks")
        for rank in ranks:
            for _ in range(3):
                rank.step()
        until(lambda: [rank.step for rank in live.view().ranks] == [3, 3], "three steps")
        assert isinstance(node._host, ThreadHost)
        assert node._host.service.control is not None
        until(lambda: live._intake.peer_of("local", 1) == node.peer_id, "a report over the network")
        view = live.view()
        assert [rank.rank for rank in view.ranks] == [0, 1]
        assert view.notice == ""
        assert {rank.host for rank in view.ranks} == {node.snapshot()[0].host}


def test_invalid_settings_and_recordings_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("RINGFORT_KEY", NetworkNamespace.generate("test").join_code())
    with pytest.raises(ConfigError), LiveSource(AutoDiscoveryConfig(interfaces=["nothing9"])):
        pass
    with pytest.raises(InvalidArgumentError, match="cannot be created"), LiveSource(LOCAL, record=tmp_path / "a" / "b"):
        pass
