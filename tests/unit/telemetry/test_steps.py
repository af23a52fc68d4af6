"""How many steps a program has done, as others count them."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ringfort import DistributedContext, SimulatedBackend
from ringfort.telemetry.steps import StepFile, Steps, own_steps
from ringfort.training import average_gradients


class Doer:
    """An optimizer, say."""


def test_the_one_who_has_done_most_is_how_far_the_program_is() -> None:
    steps, generator, critic = Steps(), Doer(), Doer()
    for doer in (generator, critic, critic, generator, critic):
        steps.mark(doer)
    assert steps.done == 3


@dataclass
class Unhashable:
    """As some optimizers are."""

    lr: float = 0.1


class Slotted:
    """Without room for a mark."""

    __slots__ = ()


def test_any_object_may_do_steps() -> None:
    steps, doer = Steps(), Unhashable()
    for _ in range(3):
        steps.mark(doer)
    steps.mark(Slotted())
    assert steps.done == 3


def test_who_is_gone_is_not_kept_and_what_it_did_stays_done() -> None:
    steps, first = Steps(), Doer()
    for _ in range(3):
        steps.mark(first)
    del first
    steps.mark(Doer())
    assert steps.done == 3


def test_another_process_writes_and_the_launcher_reads() -> None:
    program = "import sys; from ringfort.telemetry.steps import own_steps; [own_steps().mark(sys) for _ in range(7)]"
    with closing(StepFile()) as file:
        assert file.path is not None
        assert file.read() == 0
        subprocess.run([sys.executable, "-c", program], check=True, env={"RINGFORT_STEP_FILE": file.path}, timeout=60)
        assert file.read() == 7
        file.clear()
        assert file.read() == 0
        path = Path(file.path)
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_a_launcher_that_is_gone_is_told_nothing(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", tmp_path, Path("/dev/full")):
        steps = Steps(str(path))
        steps.mark(steps)
        assert steps.done == 1


def test_a_file_that_somebody_cut_or_removed_harms_nobody() -> None:
    file = StepFile()
    assert file.path is not None
    steps = Steps(file.path)
    steps.mark(steps)
    os.truncate(file.path, 0)
    assert file.read() == 0
    steps.mark(steps)
    assert file.read() == 2
    Path(file.path).unlink()
    file.close()
    file.close()
    assert (file.read(), file.path) == (0, None)


def test_without_room_for_a_file_steps_are_not_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    file = StepFile()
    file.clear()
    assert (file.path, file.read()) == (None, 0)
    file.close()


def test_averaging_gradients_is_a_step() -> None:
    [backend] = SimulatedBackend.create_group(1)
    context, before = DistributedContext(backend), own_steps().done
    for _ in range(before + 2):
        average_gradients(context, [np.ones(3, np.float32)])
    assert own_steps().done == before + 2
