"""`ringfort demo` as people run it: real processes from start to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

RINGFORT = [sys.executable, "-m", "ringfort.cli"]
NUMPY = ["--framework", "numpy"]


def ringfort(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RINGFORT, *arguments], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("framework", "ranks", "steps"),
    [("numpy", 1, 8), pytest.param("numpy", 3, 60, id="kill"), ("torch", 3, 8)],
)
def test_the_demo_proves_itself_and_prints_one_json_document(framework: str, ranks: int, steps: int) -> None:
    if framework == "torch" and find_spec("torch") is None:
        pytest.skip("torch is not installed: pip install torch")
    done = ringfort("demo", "--framework", framework, "--ranks", str(ranks), "--steps", str(steps), "--json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["passed"]
    assert outcome["settings"]["framework"] == framework
    assert len(outcome["group"]["digests"]) == ranks
    assert len(set(outcome["group"]["digests"])) == 1
    assert outcome["group"]["applied"] == [[1, 1]] * ranks
    losses = outcome["group"]["losses"]
    assert len(losses) == len(outcome["reference"]["losses"]) == steps
    assert losses[0] == pytest.approx(4.6, abs=0.3)
    assert losses[-1] < losses[0] - 0.2
    faults = outcome["group"]["faults"]
    assert len(faults) == (steps == 60)
    for fault in faults:
        assert 20 <= fault["step"] < fault["back_at"] <= 60


def test_without_a_terminal_the_demo_prints_plain_lines() -> None:
    done = ringfort("demo", *NUMPY, "--steps", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PASS") == 4
    assert "The model writes:" in done.stdout
    assert "step 1 to 4: loss " in done.stdout
    assert "ringfort run --nodes 2 train.py" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def _descendants(process: subprocess.Popen[str], count: int) -> Sequence[psutil.Process]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        # The ranks that the demo starts, and not the control process that each of them has.
        found = psutil.Process(process.pid).children()
        if len(found) >= count:
            return found
        time.sleep(0.02)
    raise AssertionError("the ranks did not start")


def test_ctrl_c_ends_every_process_within_two_seconds_without_a_traceback() -> None:
    with subprocess.Popen(
        [*RINGFORT, "demo", *NUMPY, "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "step" in line and "loss" in line:
                break
        ranks = _descendants(process, 3)
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        _, stderr = process.communicate(timeout=10)
        taken = time.monotonic() - start
    assert process.returncode == 130
    assert stderr == "interrupted\n"
    assert taken < 2
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def test_a_peer_that_a_person_kills_is_started_again_and_joins_the_run() -> None:
    with subprocess.Popen(
        [*RINGFORT, "demo", *NUMPY, "--steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout)
            assert any("step" in line and "loss" in line for line in lines)
            victim = max(_descendants(process, 3), key=lambda rank: rank.pid)
            victim.kill()
            assert any("was killed (SIGKILL)" in line for line in lines)
            assert any("the others continue" in line for line in lines)
            assert any("is back with a copy of the state" in line for line in lines)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=10)
    assert process.returncode == 130


def test_without_torch_the_demo_is_numpys_and_says_how_to_get_the_other(tmp_path: Path) -> None:
    # A module that cannot be found stands before the one that may be installed.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    plain, asked = (
        subprocess.run(
            [*RINGFORT, "demo", "--ranks", "1", "--steps", "2", "--json", *more],
            env=variables, capture_output=True, text=True, timeout=100, check=False,
        )
        for more in ([], ["--framework", "torch"])
    )  # fmt: skip
    assert json.loads(plain.stdout)["settings"]["framework"] == "numpy", plain.stderr
    assert asked.returncode == 1
    assert "pip install 'ringfort[torch]'" in asked.stderr
