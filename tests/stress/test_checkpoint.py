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


def run(folders: list[Path], steps: int) -> str:
    """What both launchers print; each works in its own folder, as if on a machine of its own."""
    command = [sys.executable, "-m", "ringfort", "run", "--nodes", "2", str(PROGRAM), "--rank0", "--folder", "run1"]
    command += ["--save-every", "4", "--steps", str(steps)]
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
    words = "".join(one.communicate(timeout=PATIENCE)[0] for one in runs)
    assert [one.returncode for one in runs] == [0, 0], words
    return words


def losses(words: str) -> dict[str, str]:
    return dict(re.findall(r"step (\d+) loss (\S+)", words))


def test_whoever_has_the_newest_file_hands_it_out(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("study", "attic")]
    for folder in folders:
        folder.mkdir()
    run(folders, 4)
    [file] = tmp_path.rglob("step-4.pt")
    resumed = run(folders, 8)
    assert "resumed after step 4" in resumed
    for other in tmp_path.rglob("step-8.pt"):
        other.unlink()
    elsewhere = next(folder for folder in folders if folder != file.parents[1])
    file.rename(elsewhere / "run1" / file.name)  # now the other machine has it
    again = run(folders, 8)
    assert "resumed after step 4" in again
    assert losses(again) == losses(resumed)
