"""What a launcher knows of its ranks: the folder of their traces, and how far they are."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ringfort.telemetry.launched_traces import LaunchedTraces
from ringfort.telemetry.trace import OFF
from ringfort.telemetry.trace_file import TraceReader

PROGRAM = """
import sys
from ringfort.telemetry.trace import own_trace

trace = own_trace()
trace.describe(rank=0, world_size=1)
for _ in range(int(sys.argv[1])):
    trace.mark(sys)
print("done", flush=True)
sys.stdin.read()
"""


def rank(traces: LaunchedTraces, steps: int) -> subprocess.Popen[str]:
    """A rank that has done so many steps, and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(steps)],
        env={**os.environ, **traces.variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    return process


def test_the_latest_step_of_any_rank_is_read_and_what_was_done_stays_done() -> None:
    with closing(LaunchedTraces()) as traces:
        folder = traces.folder
        assert folder is not None
        assert traces.step() == 0
        with rank(traces, 3) as slow, rank(traces, 7) as killed:
            assert traces.step() == 7
            killed.kill()
            slow.communicate()
        assert traces.step() == 7
        assert list(folder.glob("*.trace")) == [folder / f"{killed.pid}.trace"]  # to be looked at
        traces.clear()
        assert traces.step() == 0
        with rank(traces, 2) as again:
            assert traces.step() == 2
            again.communicate()
    assert not folder.exists()
    traces.close()
    assert traces.step() == 2


def test_files_that_are_no_traces_are_not_read() -> None:
    with closing(LaunchedTraces()) as traces:
        assert traces.folder is not None
        (traces.folder / "1.trace").write_bytes(b"nothing")
        assert traces.step() == 0


def test_without_a_folder_ranks_write_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RINGFORT_TELEMETRY", OFF)
    assert LaunchedTraces().variables == {"RINGFORT_TELEMETRY": OFF, "RINGFORT_RUN": ""}
    monkeypatch.delenv("RINGFORT_TELEMETRY")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.joinpath("ringfort").write_text("in the way")
    with closing(LaunchedTraces()) as traces:
        assert traces.variables == {"RINGFORT_TELEMETRY": OFF, "RINGFORT_RUN": ""}
        assert traces.step() == 0


def test_ranks_show_the_name_that_their_launcher_gave_the_run() -> None:
    with closing(LaunchedTraces("mine")) as traces, rank(traces, 1):
        assert traces.folder is not None
        (path,) = traces.folder.glob("*.trace")
        with closing(TraceReader(path)) as reader:
            assert reader.header().run == "mine"
    with closing(LaunchedTraces()) as traces:
        assert traces.variables["RINGFORT_RUN"] == ""  # not that of another launcher around this one
