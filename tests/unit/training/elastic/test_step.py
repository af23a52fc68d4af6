"""A step, as the program uses and misuses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringfort.errors import InvalidArgumentError
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.protocol import Compute, Mark, Result
from ringfort.training.elastic.step import Done, Step, Turn

DATA = Data(100, 10, 5, seed=3)
MARK = Mark("b@1", 6)
DONE = Done(Result("b@1", 7, 14), 4.0, 10.0, samples=2)


class Run:
    """Deals two micro-batches."""

    def __init__(self, *script: Turn | Done) -> None:
        self.script = list(script)
        self.added: list[int] = []
        self.told: list[str] = []

    def advance(self) -> Turn | Done | None:
        return self.script.pop(0) if self.script else None

    def samples_of(self, turn: Turn) -> Any:
        return np.array([turn.compute.part])

    def random_of(self, turn: Turn) -> np.random.Generator:
        return DATA.random(turn.compute.step, turn.compute.part)

    def add(self, turn: Turn, gradients: Any, count: float | None, loss: float) -> None:
        if gradients is None:
            raise ValueError
        self.added.append(turn.compute.part)

    def mean_of(self, done: Done) -> Any:
        return done.weight

    def sealed(self, done: Done) -> None:
        self.told.append("sealed")

    def applied(self, done: Done) -> None:
        self.told.append("applied")


def step_of(*script: Turn | Done) -> tuple[Step, Run]:
    run = Run(*script[1:])
    return Step(run, script[0]), run


PARTS = tuple(Turn(Compute(7, part, DATA.span(MARK.cursor)), MARK) for part in range(2))


def test_a_step_yields_its_parts_and_then_has_a_mean() -> None:
    step, run = step_of(*PARTS, DONE)
    assert step.number == 7
    for part in step:
        step.add(part)
    assert (run.added, step.mean(), step.loss, step.skipped) == ([0, 1], 4.0, 2.5, False)
    assert run.told == ["sealed"]
    step.end()
    assert run.told == ["sealed", "applied"]
    assert (step.number, step.loss, step.samples) == (7, 2.5, 2)
    with pytest.raises(InvalidArgumentError, match="is over"):
        step.mean()


def test_a_part_that_was_not_added_comes_again() -> None:
    step, run = step_of(*PARTS, DONE)
    with pytest.raises(InvalidArgumentError, match="once for each"):
        list(step)
    with pytest.raises(InvalidArgumentError, match="every micro-batch"):
        step.mean()
    for part in step:
        with pytest.raises(ValueError):  # noqa: PT011
            step.add(None)
        step.add(part)
    assert run.added == [0, 1]


def test_breaking_out_of_a_step_loses_nothing() -> None:
    step, run = step_of(*PARTS, DONE)
    for _ in step:
        break
    with pytest.raises(InvalidArgumentError, match="every micro-batch"):
        step.end()
    for part in step:
        step.add(part)
        with pytest.raises(InvalidArgumentError, match="once"):
            step.add(part)
    assert run.added == [0, 1]


def test_a_skipped_step_has_no_mean() -> None:
    step, _ = step_of(DONE._replace(is_finite=False))
    assert step.skipped
    with pytest.raises(InvalidArgumentError, match="skipped"):
        step.mean()


def test_a_step_without_weights_is_skipped_but_not_one_that_was_overtaken() -> None:
    step, _ = step_of(DONE._replace(weight=0.0, loss=0.0))
    assert (step.skipped, step.loss) == (True, 0.0)
    with pytest.raises(InvalidArgumentError, match=r"count=0; look at step\.skipped"):
        step.mean()
    step, _ = step_of(DONE._replace(weight=0.0, loss=0.0, is_overtaken=True))
    assert (step.skipped, step.mean()) == (False, 0.0)


def test_a_member_that_was_away_continues_with_a_later_step() -> None:
    step, _ = step_of(PARTS[0], Done(Result("b@1", 12, 24), 4.0, 10.0))
    for part in step:
        step.add(part)
    assert step.number == 12


def test_a_micro_batch_has_the_same_random_numbers_wherever_it_is_computed() -> None:
    def drawn(*turns: Turn) -> dict[int, list[float]]:
        found = dict[int, list[float]]()
        step, _ = step_of(*turns, DONE)
        for part in step:
            found[int(part[0])] = [step.random.random(), step.random.random()]  # the second is another number
            step.add(part)
            assert step.random.random() not in found[int(part[0])]
        return found

    both = drawn(*PARTS)
    assert both == drawn(*reversed(PARTS)) == drawn(PARTS[0]) | drawn(PARTS[1])
    assert len({number for numbers in both.values() for number in numbers}) == 4


def test_a_micro_batch_that_comes_again_begins_its_random_numbers_again() -> None:
    step, _ = step_of(*PARTS, DONE)
    drawn = list[float]()
    for _ in step:
        drawn.append(step.random.random())
        break
    for part in step:
        drawn.append(step.random.random())
        step.add(part)
    assert drawn[0] == drawn[1] != drawn[2]


def test_there_are_no_random_numbers_outside_a_micro_batch() -> None:
    step, _ = step_of(*PARTS, DONE)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="use it inside `for part in step`"):
            step.random  # noqa: B018
        for part in step:
            step.add(part)
