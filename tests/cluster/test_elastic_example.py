"""The examples of elastic training, as people run them."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "elastic_numpy.py"


def untrained() -> str:
    """The digest of the weights before the first step."""
    weights = runpy.run_path(str(EXAMPLE))["new_state"](seed=0)["weights"]
    return sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()[:16]


def weights(example: Path, home: Path, *arguments: str) -> list[tuple[str, str]]:
    """Run an example with two members. Return the last step and the digest of the weights of each."""
    command = [sys.executable, "-m", "ringfort", "run", "--elastic", "-n", "2", "--nodes", "2:2", "--interface"]
    command += ["127.0.0.1", str(example), *arguments]
    env = {**os.environ, "RINGFORT_HOME": str(home), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert run.returncode == 0, run.stderr
    return re.findall(r"done at step (\d+), weights ([0-9a-f]{16})$", run.stdout, re.MULTILINE)


def test_the_example_ends_with_the_same_weights_on_all_members(tmp_path: Path) -> None:
    first, second = weights(EXAMPLE, tmp_path, "--steps", "20")
    assert first == second
    assert first[0] == "20"
    assert first[1] != untrained()


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: pip install torch")
def test_the_example_of_torch_ends_with_the_same_weights_on_all_members(tmp_path: Path) -> None:
    first, second = weights(EXAMPLES / "elastic_torch.py", tmp_path, "--epochs", "2")
    assert first == second
    assert first[0] == "32"
