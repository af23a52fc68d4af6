"""Real processes over Gloo and MPI, one of which is killed: the others name it, also inside an engine's collective."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringfort.bench.engines.mpi import OpenMpiShmEngine
from ringfort.testing.groups import reserved_addresses
from tests.helpers import mpi

ROOT = Path(__file__).parents[2]
LOST = re.compile(r"rank (\d) lost (\d) after ([\d.]+) s")
PROMPT = 5.0
"""Seconds in which a death is told, on a busy machine too; far below the timeout."""


def check(said: str) -> None:
    found = LOST.findall(said)
    assert sorted((rank, lost) for rank, lost, _ in found) == [("0", "1"), ("2", "1")], said
    assert all(float(seconds) < PROMPT for _, _, seconds in found), said


def test_a_killed_rank_over_gloo_is_named_by_the_others() -> None:
    pytest.importorskip("torch")
    with reserved_addresses(1) as (master,):
        command = [sys.executable, "-m", "tests.workers.engine", "gloo"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), "3", master],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(3)
        ]
        check("".join(rank.communicate(timeout=60)[0] for rank in ranks))


def test_a_killed_rank_over_an_mpi_that_goes_on_is_named_by_the_others() -> None:
    """Most MPIs end all ranks when one dies. Open MPI, if told to, does not."""
    run = mpi.launch(OpenMpiShmEngine, 3, "-m", "tests.workers.engine", "mpi", flags=("--with-ft", "ulfm"))
    check(run.stdout)
