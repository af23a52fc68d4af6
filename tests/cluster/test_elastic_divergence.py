"""Real processes of which one damages its copy of a result or of the state: the others notice, and continue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from ringfort.training.elastic.checkpoint import CheckpointFolder
from ringfort.training.elastic.state_tree import StateTree
from tests.workers.diverging import SAMPLES

Process: TypeAlias = "subprocess.Popen[str]"
LIMIT = 90.0
"""Seconds for what takes a few on an idle machine."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start `tests.workers.diverging` with these arguments."""
    home = tmp_path / "home"
    home.mkdir(0o700)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RINGFORT_")}
    made = list[Process]()

    def begin(**arguments: Any) -> Process:
        command = [sys.executable, "-m", "tests.workers.diverging", json.dumps(arguments)]
        environment = {**variables, "RINGFORT_HOME": str(home)}
        made.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield begin
    for process in made:
        process.kill()
        process.wait(LIMIT)
        process.stdout.close()


def end_of(process: Process) -> dict[str, Any]:
    """Wait for the end of a process, and return what it said last."""
    return json.loads(process.communicate(timeout=LIMIT)[0].splitlines()[-1])


def test_a_damaged_copy_is_repaired_and_a_machine_that_damages_it_again_leaves(start: Callable[..., Process]) -> None:
    bad = start(nodes="3:4", result_once=10, state_at=40, result_from=120)
    others = [start(nodes="3:4") for _ in range(2)]
    failed = end_of(bad)
    assert (bad.returncode, failed.get("step")) == (3, 120)
    assert failed["failed"].startswith("The result of step 120 on ")
    assert "differs from that of most members, twice in a row, so it has left the run" in failed["failed"]
    others.append(start(nodes="3:4"))  # in its place: three are needed
    ends = [end_of(process) for process in others]
    assert [process.returncode for process in others] == [0, 0, 0]
    assert [(end["done"], end["seen"]) for end in ends] == [(150, [50])] * 3
    for end in ends[:2]:
        told = "\n".join(end["events"])
        assert "The copies of the result of step 10 differ" in told
        assert "after step 100 differs from that of the others in state['seen']; it takes theirs" in told
        assert "The copies of the result of step 120 differ" in told
        assert f"The result of step 120 on {failed['machines'][0]} differs from that of most members" in told
        assert told.count("it is reduced again") == 2


def test_two_machines_with_different_states_are_both_named_and_end_and_each_saves_its_own(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    both = [start(state_at=40, checkpoint=str(tmp_path / "bad")), start(checkpoint=str(tmp_path / "good"))]
    seen = list[Any]()
    for end, folder in zip(map(end_of, both), ("bad", "good"), strict=True):
        assert (end.get("step"), len(end["machines"])) == (100, 2)
        assert end["failed"].startswith("The state after step 100 (state['seen']) differs between ")
        [file] = tmp_path.glob(f"{folder}-*/*.ringfort")
        assert f"its state is in {file}" in end["failed"]
        saved = CheckpointFolder(file.parent).newest(lambda _: "")
        assert saved is not None
        state = {"seen": np.zeros(SAMPLES), "steps": 0, "moving": np.zeros(2)}
        StateTree(state).load(saved.read())
        assert (saved.stamp.step, state["steps"]) == (100, 100)
        seen.append(state["seen"])
    assert np.flatnonzero(seen[0] - seen[1]).tolist() == [7]
    assert [process.returncode for process in both] == [3, 3]


def test_machines_of_another_class_drift_and_get_the_state_of_the_first(start: Callable[..., Process]) -> None:
    both = [start(machine_class="PC", total=200), start(machine_class="Mac", total=200, drift=1e-9)]
    ends = [end_of(process) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert ends[0]["moving"] == ends[1]["moving"]
    for end in ends:
        drifts = [line for line in end["events"] if "drift" in line]
        assert len(drifts) == 1
        assert "has drifted up to step 100 in state['moving']" in drifts[0]
