"""`python -m benchmarks.elastic` at its shortest, on loopback: tests/stress/test_elastic_storm.py has the long runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.source import ROOT

SMALL = ("--loopback", "--mib", "0.1", "--state-mb", "0", "--batch", "32", "--seed", "2")


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    folder.mkdir()
    where = ("--json", str(folder / "figures.json"), "--keep", str(folder / "logs"))
    command = [sys.executable, "-m", "benchmarks.elastic", *SMALL, *where, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def figures(folder: Path) -> dict[str, dict[str, Any]]:
    return {line["figure"]: line for line in map(json.loads, (folder / "figures.json").read_text().splitlines())}


def test_a_short_storm_and_a_short_churn_report_their_figures(tmp_path: Path) -> None:
    timing = ("--storm", "1.5", "--every", "1", "--away", "0.2", "--alone", "0.3", "--calm", "0.3")
    storm = begin(tmp_path / "storm", "--members", "2", "--faults", "kill,cut", *timing)
    churn = begin(tmp_path / "churn", "--churn", "2")
    for process in (storm, churn):  # side by side: most of the time they wait
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, f"{out}\n{err}"
        assert "the state of each member at each step is that of a run without faults" in out
    found = figures(tmp_path / "storm")
    assert list(found) == ["alone", "calm", "storm"]
    assert found["storm"]["faults"] == {"kill": 1}  # there are no cuts on loopback
    assert found["storm"]["steps"] > 0
    assert 0 < found["storm"]["goodput"] <= 1.2  # the rate alone is a rough one after 0.3 s
    assert figures(tmp_path / "churn")["churn"]["steps"] > 0
    assert list((tmp_path / "churn" / "logs" / "churn").iterdir())
