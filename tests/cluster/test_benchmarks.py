"""`python -m benchmarks` from measuring to the page, as `make bench` runs it, at its quickest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.namespaces import why_not
from tests.helpers.source import ROOT

pytest.importorskip("matplotlib")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    where = ["--results", str(folder), "--docs", str(folder), "--machine", "here"]
    command = [sys.executable, "-m", "benchmarks", "--quick", *where, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_hosts_are_measured_over_a_wire_and_gone_afterwards(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "hosts")
    assert done.returncode == 0, done.stderr
    [report] = json.loads((tmp_path / "here" / "hosts.json").read_text())["reports"]
    # 1 MiB takes 8 ms at 1 Gbit/s, of which a part goes out at once: far above what loopback takes.
    assert all(engine["median_us"] > 3000 for engine in report["rows"][0]["engines"].values())
    assert "part of the rate of a 1 Gbit/s line" in (tmp_path / "performance.md").read_text()
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "ringfort-bench" not in names


def test_an_unknown_section_is_refused_with_those_there_are(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "three")
    assert done.returncode == 2
    assert "unknown section 'three'; choose from: two, four" in done.stderr
