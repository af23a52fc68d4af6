"""Ringfort in Ray, on a real cluster of several machines (on this one): trainers, and an elastic run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.documents import blocks
from tests.workers.elastic import plain_loop

TOTAL = 250
"""As in tests/workers/ray_driver.py, which imports Ray."""
PATIENCE = 1200
"""Seconds for all cases, which take 180 on an idle machine."""

pytestmark = pytest.mark.timeout(PATIENCE + 60)


def driven(cases: str, folder: Path) -> dict[str, Any]:
    """What the driver says of its cases, in a cluster of their own."""
    missing = [package for package in ("ray", "torch", "pandas", "pyarrow") if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {' '.join(missing)}: pip install 'ray[train]' torch (`make integration` does it)")
    command = [sys.executable, "-m", "tests.workers.ray_driver", cases, str(folder)]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=PATIENCE, check=False,
        # At 15, its default, Ray's workers starve on a machine that has other things to do.
        env={**os.environ, "RAY_worker_niceness": "0"},
    )  # fmt: skip
    found: dict[str, Any] = {"ran": []}
    for line in run.stdout.splitlines():
        if line.startswith("{"):
            told = json.loads(line)
            found["ran"] += [told.pop("ran")] if "ran" in told else []
            found |= told
    assert run.returncode == 0, f"{found}\n{run.stderr[-3000:]}"
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return driven("trainings", tmp_path_factory.mktemp("ray"))


@pytest.mark.parametrize("library", ["numpy", "jax.numpy", "mlx.core"])
def test_workers_of_a_trainer_are_ranks_on_two_machines(library: str, said: dict[str, Any]) -> None:
    package = library.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install {package}")
    one, other = said["arrays"][library]
    assert [one[:-1], other[:-1]] == [[0, 2, 3.0, 0.5, "0", True], [1, 2, 3.0, 0.5, "0", True]]
    assert one[-1] != other[-1]


def test_a_torch_trainer_takes_the_backend(said: dict[str, Any]) -> None:
    assert said["torch"] == [[rank, "ringfort", 1.0, "RingfortProcessGroup"] for rank in range(2)]


def test_machines_that_ray_takes_away_and_adds_cost_no_step(said: dict[str, Any]) -> None:
    from tests.workers.launched import digest

    assert "waited" not in said, said
    assert (said["grown"], said["shrunk"], said["again"]) == (True, True, True)
    assert said["elastic"] == [{"done": TOTAL, "state": digest(plain_loop(TOTAL))}] * 3


def test_the_blocks_of_the_document_run(tmp_path: Path) -> None:
    shown = [block.where for block in blocks() if block.needs == ("a Ray cluster",)]
    assert len(shown) == 3
    assert driven("blocks", tmp_path)["ran"] == shown


def test_a_member_that_fails_again_and_again_ends_the_run(said: dict[str, Any]) -> None:
    assert said["failed"] == "A member of 'ray' failed 3 times: RuntimeError: no such data"
    assert said["cause"] == "RayTaskError(RuntimeError)"
    assert sum(said["failures"]) >= 3
