"""`python -m benchmarks.elastic` at its shortest, on loopback: tests/stress/test_elastic_storm.py has the long runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.helpers.source import ROOT


def test_a_short_storm_and_a_short_churn_report_their_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.elastic", "--loopback", "--json", str(file), "--members", "3"]
    command += ["--mib", "0.1", "--state-mb", "0", "--batch", "32", "--seed", "2"]
    command += ["--storm", "2.5", "--every", "1", "--away", "0.2", "--faults", "kill,cut", "--alone", "0.3"]
    command += ["--calm", "0.3", "--churn", "3", "--keep", str(tmp_path / "logs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "no cuts on loopback" in done.stdout
    found = {line["figure"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert list(found) == ["alone", "calm", "storm", "churn"]
    assert found["storm"]["faults"] == {"kill": 2}
    assert found["storm"]["steps"] > 0
    assert 0 < found["storm"]["goodput"] <= 1.2  # a rate alone of 0.3 s is a rough one
    assert found["churn"]["steps"] > 0
    assert list((tmp_path / "logs").iterdir())
