"""What a launcher keeps and shows of its ranks: only what was asked for."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ringfort.launch.printer import Printer
from ringfort.launch.run_options import RunOptions
from ringfort.launch.run_watch import RunWatch
from ringfort.telemetry.records import Header, Step
from ringfort.telemetry.trace_file import TraceWriter
from tests.unit.launch.test_printer import Stream


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")


def status(is_terminal: bool = True, **given: Any) -> str:
    """The status of a run with one rank that has made a step."""
    printer = Printer(Stream(is_terminal), Stream(is_terminal))
    with closing(RunWatch(RunOptions(script=__file__, **given), printer)) as watch:
        assert watch.traces.folder is not None
        with closing(TraceWriter(watch.traces.folder / "1.trace")) as writer:
            writer.describe(Header(1, 0.0, rank=0, world_size=1))
            writer.write(Step(7, 1.0, 0.5))
            writer.set_step(7)
            watch.tick()
    return printer.status


def test_a_terminal_has_a_status_unless_it_was_turned_off() -> None:
    assert status() == "step 7 · 1 rank · 2 steps/s"
    assert status(status=False) == ""
    assert status(is_terminal=False) == ""


def test_nothing_is_left_at_the_end_but_the_logs(tmp_path: Path) -> None:
    options = RunOptions(script=__file__, log_dir=str(tmp_path / "logs"), metrics="0")
    with closing(RunWatch(options, Printer(Stream(), Stream()))) as watch:
        folder = watch.traces.folder
        watch.logs.begin(0)
        watch.logs.write(0, b"word")
        watch.tick()
        assert folder is not None
        assert (folder / "rank-0.log").read_bytes() == b"word"
    assert not folder.exists()
    assert (tmp_path / "logs" / "rank-0.log").read_bytes() == b"word"


def test_if_one_thing_cannot_be_had_the_others_are_closed(tmp_path: Path) -> None:
    options = RunOptions(script=__file__, metrics="192.0.2.1:1")
    with pytest.raises(ConnectionError, match="cannot serve metrics"):
        RunWatch(options, Printer(Stream(), Stream()))
    assert list((tmp_path / "ringfort").iterdir()) == []
