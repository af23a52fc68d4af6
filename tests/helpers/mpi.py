"""The conformance checks over an MPI, all of them under one launch: `mpiexec` takes longer than most checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ringfort.bench.engines.mpi import MpiEngine, installed
from ringfort.testing import ALL_CHECKS

RANKS = max(check.ranks for check in ALL_CHECKS.values())
LAUNCH_TIMEOUT = 110
"""Seconds for all checks: below the limit of a test, so that what the ranks said is seen."""


def launch(
    engine: type[MpiEngine], ranks: int, *arguments: str, flags: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS` on so many ranks; the test is skipped where the MPI is not installed."""
    if not engine.available():
        pytest.skip(f"{engine.name} is not installed: {engine.install}")
    return subprocess.run(
        [str(installed(engine.starter)), *engine.flags, *flags, "-n", str(ranks), sys.executable, *arguments],
        env={**os.environ, "MPI4PY_LIBMPI": str(installed(*engine.libraries))},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=LAUNCH_TIMEOUT,
        check=False,
    )


@cache
def outcomes(engine: type[MpiEngine]) -> Sequence[Mapping[str, str | None]] | str:
    """What each rank said of each check, or the last words of a launch that failed."""
    with TemporaryDirectory() as folder:
        run = launch(engine, RANKS, "-m", "tests.workers.mpi", folder)
        if run.returncode:
            return f"the launch ended with {run.returncode}:\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


def judge(engine: type[MpiEngine], name: str) -> None:
    """Fails the test if the check does not hold over `engine`."""
    found = outcomes(engine)
    assert not isinstance(found, str), found
    check = ALL_CHECKS[name]
    check.judge([found[rank][name] for rank in range(check.ranks)])
