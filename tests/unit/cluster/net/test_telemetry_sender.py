"""What the control process loads for telemetry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
