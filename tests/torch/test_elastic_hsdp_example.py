"""The example of elastic HSDP, as people run it."""

from __future__ import annotations

import os
import re
import signal
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.cluster.test_run import Launcher, launched

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: pip install torch")

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "elastic_hsdp.py")
STEPS = 50
"""One machine alone needs 20 seconds for them: the other is back much sooner."""


def until(launcher: Launcher, wanted: str) -> str:
    """Return what it says, up to and including a line with `wanted`."""
    said = ""
    while not re.search(wanted, said):
        line = launcher.line()
        assert line, said + launcher.end()[2]
        said += line
    return said


def test_a_machine_whose_rank_is_killed_joins_again_and_all_end_with_the_same_weights(tmp_path: Path) -> None:
    variables = {"RINGFORT_HOME": str(tmp_path / "home")}
    options = ["--elastic", "--nodes", "1:2", "-n", "2", EXAMPLE, "--steps", str(STEPS), "--pause", "0.1"]
    one = Launcher(*options, variables=variables)
    other = Launcher(*options, variables=variables)
    with launched(one, other):
        until(other, "2 members")
        ranks = [child for child in psutil.Process(other.process.pid).children() if EXAMPLE in child.cmdline()]
        assert len(ranks) == 2
        os.kill(ranks[1].pid, signal.SIGKILL)
        until(one, "1 members")
        until(one, "2 members")
        code, out, err = one.end()
        assert code == 0, err
        ended, rest, told = other.end()
        assert ended == 0, told
    assert re.search(r"rank \d .*; starting all 2 ranks, which are one member, again in 0.5 s, restart 1 of 3", told)
    digests = re.findall(rf"done at step {STEPS}, weights ([0-9a-f]{{16}})$", out + rest, re.MULTILINE)
    assert len(digests) == 4
    assert len(set(digests)) == 1
