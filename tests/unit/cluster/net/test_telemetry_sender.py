"""What the control process loads for telemetry, and whose output it sends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from ringfort.cluster.net.telemetry_sender import TelemetrySender
from ringfort.telemetry.records import Header
from ringfort.telemetry.trace_file import TraceWriter
from ringfort.telemetry.watching import LOGS, LogRequest, decode_part, encode

_REPORT = """
import sys, pathlib
import ringfort.cluster.net.service
from ringfort.cluster.net.telemetry_sender import TelemetrySender
from ringfort.telemetry.records import Header
from ringfort.telemetry.trace_file import TraceWriter
from ringfort.telemetry.vitals import Vitals
folder = pathlib.Path(sys.argv[1])
writer = TraceWriter(folder / "1.trace")
writer.describe(Header(1, 0.0))
sender = TelemetrySender(lambda topic, body, peer: None, "host", "name", folder)
print(len(sender._collect(Vitals())))
print(sorted({"numpy", "torch", "rich", "textual", "starlette", "ringfort.telemetry.history"} & set(sys.modules)))
"""


def test_a_control_process_reports_ranks_without_numpy(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _REPORT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["1", "[]"]


@pytest.fixture
def sent() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def sender(tmp_path: Path, sent: list[tuple[str, int]]) -> Iterator[TelemetrySender]:
    """Of two ranks, with a viewer that looks."""
    with ExitStack() as stack:
        for rank in range(2):
            writer = stack.enter_context(closing(TraceWriter(tmp_path / f"{rank}.trace")))
            writer.describe(Header(rank, 0.0, rank))
            (tmp_path / f"rank-{rank}.log").write_text("hello")
        found = TelemetrySender(
            lambda _, body, peer: sent.append((peer, decode_part(body).rank)), "host", "name", tmp_path
        )
        found._collect(MagicMock(read=dict))
        found._watchers.renew("viewer", 0.0)
        yield found
        found._traces.close()


def test_the_output_of_two_ranks_of_one_machine_is_sent(
    sender: TelemetrySender, sent: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfort.cluster.net.telemetry_sender.clock", lambda: 1.0)
    for _ in range(3):
        for rank in range(2):
            assert sender.takes("viewer", LOGS, encode(LogRequest(rank)))
    assert sent == [("viewer", 0), ("viewer", 1)]
