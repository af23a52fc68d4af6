"""The short version of `python -m benchmarks.elastic_training`: models, kills and joins as in the long one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.source import ROOT

pytest.importorskip("torch")


@pytest.mark.parametrize(("model", "passes"), [("small-resnet", 2), ("small-transformer", 1)])
def test_losses_and_samples_of_a_run_with_kills_are_those_of_a_run_without(model: str, passes: int) -> None:
    command = [sys.executable, "-m", "benchmarks.elastic_training", "--model", model]
    command += ["--steps", f"{20 * passes}", "--kills", f"{passes}", "--members", "2", "--threads", "1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{passes} passes, in each every sample counted once" in ended.stdout
