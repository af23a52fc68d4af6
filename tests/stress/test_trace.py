"""`ringfort trace` on one machine, of ranks on two others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.cluster.test_run import PATIENCE, ROOT, WORKER, Launcher, ends, launched


def test_a_viewer_elsewhere_makes_a_trace_of_the_ranks_of_two_launchers(tmp_path: Path) -> None:
    end = tmp_path / "end"
    viewer, *machines = ({"XDG_RUNTIME_DIR": str(tmp_path / name)} for name in ("viewer", "one", "other"))
    for variables in (viewer, *machines):
        Path(variables["XDG_RUNTIME_DIR"]).mkdir()  # each sees its own traces only, as on machines of their own
    options = ("--nodes", "2", "--name", "mine", WORKER, "step", str(end))
    launchers = [Launcher(*options, variables=variables) for variables in machines]
    with launched(*launchers):
        command = ["trace", "--steps", "5", "--run", "mine", "-o", str(tmp_path / "trace.json")]
        ended = subprocess.run(
            [sys.executable, "-m", "ringfort.cli", *command],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "RINGFORT_INTERFACES": "127.0.0.1", **viewer},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        end.touch()
        assert [code for code, _, _ in ends(*launchers)] == [0, 0]
    assert ended.returncode == 0, ended.stderr
    assert re.match(r"\d+ steps of 2 ranks of 'mine' in .*/trace.json; open it at", ended.stderr)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for tid in (1, 2):
        assert sum(event["tid"] == tid and event.get("cat") == "step" for event in events) >= 5
    assert any(event["ph"] == "C" and event["name"] == "loss" for event in events)


# --- a terminal -------------------------------------------------------------------------------------------------------
