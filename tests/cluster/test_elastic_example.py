"""The example of elastic training, as people run it."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_numpy.py"


def untrained() -> str:
    """The digest of the weights before the first step."""
    weights = runpy.run_path(str(EXAMPLE))["new_state"](seed=0)["weights"]
    return sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()[:16]


def test_the_example_ends_with_the_same_weights_on_all_members(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ringfort", "run", "--elastic", "-n", "2", "--nodes", "2:2", "--interface"]
    command += ["127.0.0.1", str(EXAMPLE), "--steps", "20"]
    env = {**os.environ, "RINGFORT_HOME": str(tmp_path / "home")}
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert run.returncode == 0, run.stderr
    digests = re.findall(r"done at step 20, weights ([0-9a-f]{16})$", run.stdout, re.MULTILINE)
    assert len(digests) == 2, run.stdout
    assert digests[0] == digests[1] != untrained()
