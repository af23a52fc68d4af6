"""`RunCheckpoints`: a run takes its own checkpoints, and names and keeps those of other runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfort.training.elastic.checkpoint import CheckpointFolder, Stamp
from ringfort.training.elastic.protocol import FOUNDING
from ringfort.training.elastic.run_checkpoints import RunCheckpoints
from ringfort.training.elastic.state_tree import StateTree


def write(folder: Path, step: int, state: Any, run: str = "night", settings: str = "batch=64") -> None:
    stamp = Stamp(run, f"{run}@1", 1, step, step * 64, b"chain", settings)
    CheckpointFolder(folder).write(stamp, StateTree(state).image(), "study")


def found(folder: Path, state: Any) -> int:
    """The step of the checkpoint that a run takes."""
    checkpoints = RunCheckpoints(folder, 10, 3, "night", "batch=64")
    try:
        checkpoints.look(StateTree(state))
        return checkpoints.step
    finally:
        checkpoints.close()


def test_checkpoints_of_other_runs_are_named_once_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = {"w": np.zeros(3), "n": 0}
    write(tmp_path, 5, own)
    write(tmp_path, 10, own, run="day")
    write(tmp_path, 11, own, run="day")
    write(tmp_path, 20, own, settings="batch=32")
    write(tmp_path, 30, {"w": np.zeros(7), "n": 0})
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path, own) == 5
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert "step-000000030-" in lines[0]
    assert "another state: state['w'] is float64(3,) here and float64(7,) there. The one before it" in lines[0]
    assert "it is of a run with batch=32, and this one has batch=64" in lines[1]
    assert "step-000000011-" in lines[2]
    assert "it is of the run 'day', and this is 'night'" in lines[2]
    assert len(list(tmp_path.glob("*.ringfort"))) == 5


def test_a_run_continues_although_its_program_creates_some_of_its_state_later(tmp_path: Path) -> None:
    write(tmp_path, 5, {"w": np.zeros(3), "momentum": np.zeros(3)})
    assert found(tmp_path, {"w": np.zeros(3)}) == 5
    assert found(tmp_path, {"w": np.zeros(3), "momentum": np.zeros(3)}) == 5
    assert found(tmp_path, {"w": np.zeros(3), "rate": 0.1}) == FOUNDING


def test_without_a_folder_nothing_is_found() -> None:
    checkpoints = RunCheckpoints(None, 10, 3, "night", "")
    checkpoints.look(StateTree({"w": np.zeros(1)}))
    assert checkpoints.step == FOUNDING
    checkpoints.close()
