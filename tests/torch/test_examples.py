"""The examples as people run them, with tiny settings: each learns, and learns the same as its neighbours."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: pip install torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
ELSEWHERE = {"language", "notebook", "parameter_server", "actor_learner"}
"""No example by itself; and those without torch, which are in tests/cluster/test_rpc_examples.py and
test_local_group.py. Those of elastic runs are in tests/cluster/test_elastic_example.py, test_integrations.py and
test_elastic_hsdp_example.py."""
PROGRAMS = sorted(
    path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ELSEWHERE and "elastic" not in path.stem
)
RANKS = {"hsdp": 4}
NEEDS = {"with_lightning": "lightning", "with_accelerate": "accelerate"}
OF_ITS_OWN = {"checkpoint", "torchrun"}
"""Examples that have a test to themselves: in tests/stress/test_examples.py and test_torchrun.py."""
STEPS = 20
MARK = "# the line that differs; before: "
PATIENCE = 100
"""Seconds for what takes five on an idle machine."""

STEP = re.compile(r"step (\d+) loss (\d+\.\d+)")


def ringfort_run(ranks: int, program: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "ringfort", "run", "-n", str(ranks), str(program), *arguments]


def curve_in(words: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in STEP.findall(words)}


@cache
def curve(example: str, folder: Path = EXAMPLES) -> list[float]:
    """The losses of one run of an example, step by step."""
    command = ringfort_run(RANKS.get(example, 2), folder / f"{example}.py", "--steps", str(STEPS))
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr
    losses = curve_in(run.stdout)
    assert list(losses) == list(range(1, STEPS + 1)), run.stdout
    return list(losses.values())


def assert_same(ours: list[float], theirs: list[float]) -> None:
    assert ours == pytest.approx(theirs, rel=1e-3)  # up to rounding, which grows from step to step


@pytest.mark.parametrize("example", [name for name in PROGRAMS if name not in OF_ITS_OWN])
def test_an_example_learns(example: str) -> None:
    needed = NEEDS.get(example)
    if needed and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: pip install {needed}")
    losses = curve(example)
    assert losses[0] == pytest.approx(4.8, abs=0.3)  # a blind guess among some 100 characters
    assert sum(losses[-5:]) / 5 < 2.9


@pytest.mark.parametrize("example", PROGRAMS)
def test_one_line_of_an_example_is_ours_and_says_what_it_was(example: str) -> None:
    _, _, code = (EXAMPLES / f"{example}.py").read_text().removeprefix('"""').partition('"""')
    lines = [line for line in code.splitlines() if "ringfort" in line.lower() and "help=" not in line]
    assert len(lines) == 1
    assert MARK in lines[0]


def test_sharded_weights_learn_what_whole_ones_do() -> None:
    assert_same(curve("fsdp2"), curve("ddp"))
