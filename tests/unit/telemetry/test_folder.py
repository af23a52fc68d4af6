"""Where traces are: only this user can read them, and those of programs that ended a while ago go."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ringfort.telemetry import folder
from ringfort.telemetry.folder import OLD, base_folder, new_folder, programs, remove_old

NOBODY = 2**22 + 1
"""A process id that no process has: Linux gives out smaller ones."""


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folder, "runtime_folder", lambda: tmp_path / "runtime")
    return tmp_path / "runtime"


def test_a_program_has_a_folder_that_only_this_user_can_read(base: Path) -> None:
    made = new_folder()
    assert programs(base) == [made]
    assert {path.stat().st_mode & 0o777 for path in (base, made)} == {0o700}


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_folder_that_others_can_read_is_refused(base: Path, mode: int) -> None:
    base.mkdir()
    base.chmod(mode)
    with pytest.raises(PermissionError, match="only this user can read"):
        base_folder()


def test_a_link_in_its_place_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        base_folder()


@pytest.mark.parametrize(
    ("pid", "age", "stays"),
    [(NOBODY, OLD + 60, False), (NOBODY, OLD - 60, True), (os.getpid(), OLD + 60, True)],
    ids=["old", "young", "old and running"],
)
def test_only_the_traces_of_programs_that_ended_a_while_ago_are_removed(
    base: Path, pid: int, age: float, *, stays: bool
) -> None:
    left = base / f"{pid}-12345678"
    left.mkdir(0o700, parents=True)
    trace = left / f"{pid}.trace"
    trace.touch()
    for path in (trace, left):
        os.utime(path, (time.time() - age, time.time() - age))
    remove_old(base)
    assert left.exists() == stays
