"""`RunCheckpoints`: a run takes its own checkpoints, and names and keeps those of other runs."""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfort.training.elastic.checkpoint import CheckpointFolder, Stamp
from ringfort.training.elastic.protocol import FOUNDING, Mark
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


def test_a_branch_that_gives_way_is_saved_beside_the_run_s_own_checkpoints(tmp_path: Path) -> None:
    folder, state = tmp_path / "run", {"w": np.arange(3.0), "n": 7}
    write(folder, 20, {"w": np.zeros(3), "n": 20})
    mark = Mark("other@4", 50, b"another chain", 3200)
    checkpoints = RunCheckpoints(folder, 10, 3, "night", "batch=64")
    try:
        told = checkpoints.save_apart(mark, 9, StateTree(state).image())
    finally:
        checkpoints.close()
    [apart] = [found for found in tmp_path.iterdir() if found != folder]
    [file] = apart.glob("*.ringfort")
    assert told == f"its state is in {file}"
    saved = CheckpointFolder(apart).newest(lambda _: "")
    assert saved is not None
    assert saved.stamp == Stamp("night", "other@4", 9, 50, 3200, b"another chain", "batch=64")
    assert found(folder, state) == 20  # the run goes on from its own
    again = {"w": np.zeros(3), "n": 0}
    tree = StateTree(again)
    tree.load(saved.read())
    assert (again["w"].tolist(), again["n"]) == ([0, 1, 2], 7)


def test_two_branches_that_give_way_are_saved_in_folders_of_their_own(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path / "run", 10, 3, "night", "")
    try:
        for branch in ("one@4", "two@4"):
            checkpoints.save_apart(Mark(branch, 50), 9, StateTree({"w": np.zeros(3)}).image())
    finally:
        checkpoints.close()
    assert len(list(tmp_path.glob("run-*/*.ringfort"))) == 2


def test_a_branch_that_cannot_be_saved_is_dropped_with_a_word(tmp_path: Path) -> None:
    image, mark = StateTree({"w": np.zeros(3)}).image(), Mark("other@4", 50)
    without = RunCheckpoints(None, 10, 3, "night", "")
    assert without.save_apart(mark, 9, image) == "without checkpoint= its state is dropped"
    without.close()
    full = RunCheckpoints(tmp_path / "run", 10, 3, "night", "")
    try:
        (tmp_path / f"run-{blake2b(b'other@4', digest_size=4).hexdigest()}").write_text("a file is in the way")
        assert full.save_apart(mark, 9, image).startswith("its state is dropped, because it cannot be written: ")
    finally:
        full.close()
