"""The checkpoint example between launchers with a folder each: rank 0 writes, and next time another may be rank 0."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parents[2] / "examples" / "checkpoint.py"
PATIENCE = 120
"""Seconds for what takes ten on an idle machine."""


def start(folders: list[Path], *arguments: str) -> tuple[list[int], list[str]]:
    """The exit codes of two launchers and what they print; each works in its own folder, as if on its own machine."""
    command = [sys.executable, "-m", "ringfort", "run", "--nodes", "2", str(PROGRAM), "--folder", "run1", *arguments]
    runs = [
        subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "RINGFORT_INTERFACES": "127.0.0.1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for folder in folders
    ]
    words = [one.communicate(timeout=PATIENCE)[0] for one in runs]
    return [one.returncode for one in runs], words


def at_rank_0(folders: list[Path], steps: int) -> str:
    codes, words = start(folders, "--rank0", "--save-every", "4", "--steps", str(steps))
    assert codes == [0, 0], words
    return "".join(words)


def losses(words: str) -> dict[str, str]:
    return dict(re.findall(r"step (\d+) loss (\S+)", words))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("study", "attic")]
    for folder in made:
        folder.mkdir()
    return made


def test_machines_without_a_common_folder_are_refused_before_the_first_step(folders: list[Path]) -> None:
    codes, words = start(folders)
    assert all(codes)
    assert all("run1 is not one folder for all ranks: rank 1 on " in said for said in words), words
    assert not any("step 1 " in said for said in words)


def test_whoever_has_the_newest_file_hands_it_out(folders: list[Path], tmp_path: Path) -> None:
    at_rank_0(folders, 4)
    [file] = tmp_path.rglob("step-4.pt")
    resumed = at_rank_0(folders, 8)
    assert "resumed after step 4" in resumed
    for other in tmp_path.rglob("step-8.pt"):
        other.unlink()
    elsewhere = next(folder for folder in folders if folder != file.parents[1])
    file.rename(elsewhere / "run1" / file.name)  # now the other machine has it
    again = at_rank_0(folders, 8)
    assert "resumed after step 4" in again
    assert losses(again) == losses(resumed)
