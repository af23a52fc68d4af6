"""The examples of calls, as people run them: both learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE = 100
"""Seconds for what takes five on an idle machine."""


def run(example: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "ringfort", "run", "-n", "3", str(EXAMPLES / f"{example}.py"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_parameter_server_learns() -> None:
    words = run("parameter_server", "--steps", "300")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", words)]
    assert "end 600 " in words  # every push of both workers was counted
    assert losses[0] > 0.9  # three arms: a guess has 1.1
    assert losses[-1] < 0.4


def test_the_learner_learns_from_its_actors() -> None:
    returns = [float(total) for total in re.findall(r"return (-?\d+\.\d+)", run("actor_learner", "--episodes", "1200"))]
    assert len(returns) == 12
    assert returns[-1] > 0.6  # of 0.8 at the most; who walks at random loses what his steps cost
