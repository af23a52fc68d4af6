"""What a program could begin a branch with: it never claims a step that it does not have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from ringfort.training.elastic.origin import Origin
from ringfort.training.elastic.protocol import FOUNDING, Mark
from ringfort.training.elastic.state_tree import Manifest, StateTree


class Checkpoints:
    """The newest checkpoint of a run, if there is one."""

    def __init__(self, step: int | None = None) -> None:
        self.saved: Any = None
        if step is not None:
            image = StateTree({"w": np.full(2, step)}).image()
            stamp = SimpleNamespace(step=step, cursor=step * 10)
            self.saved = SimpleNamespace(stamp=stamp, path=Path("there"), read=lambda: image)

    def look(self, manifest: Manifest) -> None:
        self.looked_for = manifest

    @property
    def step(self) -> int:
        return FOUNDING if self.saved is None else self.saved.stamp.step


def origin(step: int | None = None) -> tuple[Origin, dict[str, Any], list[str]]:
    state, said = {"w": np.array([1, 1])}, list[str]()
    return Origin(StateTree(state), cast("Any", Checkpoints(step)), said.append), state, said


def result(found: Origin) -> tuple[int, int, int]:
    """Step, cursor and first weight."""
    made = found.result("b@2")
    assert (made.branch, made.is_state) == ("b@2", True)
    assert made.step == max(found.step, 0)
    return made.step, made.cursor, int(made.payload.data.view(np.int64)[0])


def test_without_a_checkpoint_a_branch_begins_with_what_the_program_began_with() -> None:
    found, _, _ = origin()
    assert found.step == FOUNDING
    assert result(found) == (0, 0, 1)


def test_the_newer_of_memory_and_disk_is_taken() -> None:
    found, state, said = origin(20)
    assert result(found) == (20, 200, 20)
    assert said == ["The run continues with there"]
    state["w"][:] = 30
    found.run_ended(Mark("a@1", 30, b"", 300))
    assert result(found) == (30, 300, 30)
    found.run_ended(Mark("c@1", 15, b"", 150))
    assert result(found) == (20, 200, 20)


def test_a_state_that_was_overwritten_by_a_copy_is_not_claimed_any_more() -> None:
    """It was at step 90 when its run ended, then copied a run at step 40, which ended too."""
    found, state, _ = origin()
    found.run_ended(Mark("a@1", 90, b"", 900))
    assert found.step == 90
    state["w"][:] = 40
    found.has_copy()
    assert found.step == FOUNDING
    found.run_ended(Mark("c@1", 40, b"", 400))
    assert result(found) == (40, 400, 40)


def test_after_a_founding_there_is_nothing_left_to_found_with_until_that_run_ends() -> None:
    found, _, _ = origin(20)
    found.has_founded()
    assert found.step == FOUNDING
    found.run_ended(Mark())  # it ended before this program had its first state
    assert found.step == FOUNDING
