"""`python -m benchmarks.elastic_compared` for Ringfort alone: kills of a member and of the leader lose no sample."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.source import ROOT

pytest.importorskip("torch")

SMALL = ("--members", "3", "--batch", "24", "--microbatch", "2", "--plain", "1")
TIMES = ("--calm", "4", "--seconds", "30", "--every", "9", "--away", "1", "--coordinator", "10")


@pytest.mark.timeout(200)
def test_kills_lose_no_sample_and_apply_none_twice(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.elastic", "--against", "torchft", "--systems", "ringfort"]
    command += [*SMALL, *TIMES, "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads((folder / "figures.json").read_text())["ringfort"]
    assert found["errors"] == []
    for phase in ("calm", "storm"):
        figures = found[phase]
        assert figures["steps"] > 0
        assert (figures["lost"], figures["twice"], figures["steps_with_two_results"]) == (0, 0, 0)
        assert figures["ended_by_themselves"] == 0
    assert found["storm"]["kills"] == 2
    assert found["storm"]["recovery"]["never"] == 0
    assert found["storm"]["join"]["count"] > 0
    assert found["coordinator"]["seconds_to_next_step"] < 10
