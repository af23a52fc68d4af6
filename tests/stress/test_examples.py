"""The examples, where that takes long: over Gloo, and killed in the middle."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from tests.torch.test_examples import EXAMPLES, MARK, PATIENCE, STEPS, assert_same, curve, curve_in, ringfort_run


def test_with_the_line_as_it_was_an_example_learns_the_same_over_gloo(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "language.py", tmp_path)
    lines = (EXAMPLES / "ddp.py").read_text().splitlines()
    before = [re.sub(rf"\S.*{MARK}(.*)", r"\1", line) for line in lines]
    assert "gloo" in "".join(before)
    (tmp_path / "ddp.py").write_text("\n".join(before))
    assert_same(curve("ddp"), curve("ddp", tmp_path))


def test_a_run_that_was_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), "--save-every", "4", "--steps"]
    command = ringfort_run(2, EXAMPLES / "checkpoint.py", *arguments, "1000")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        assert any("step 6 " in line for line in run.stdout)
        psutil.Process(run.pid).children()[-1].kill()
        run.communicate(timeout=PATIENCE)
    assert run.returncode != 0
    for later in tmp_path.glob("step-*"):  # than what it is compared with, should the kill have come late
        if int(later.name.removeprefix("step-")) >= STEPS:
            shutil.rmtree(later)
    command = ringfort_run(2, EXAMPLES / "checkpoint.py", *arguments, str(STEPS))
    again = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert again.returncode == 0, again.stderr
    resumed = re.search(r"resumed after step (\d+)", again.stdout)
    assert resumed is not None
    assert int(resumed[1]) >= 4
    losses = curve_in(again.stdout)
    assert list(losses) == list(range(int(resumed[1]) + 1, STEPS + 1))
    assert_same(list(losses.values()), curve("fsdp2")[int(resumed[1]) :])
