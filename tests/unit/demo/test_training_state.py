"""The state of the demo counts what was applied to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringfort.demo.settings import Settings
from ringfort.demo.text import load_corpus
from ringfort.demo.training_state import TrainingState
from ringfort.demo.with_numpy import NumpyLearner

SETTINGS = Settings(steps=6)


@pytest.fixture(scope="module")
def state() -> TrainingState:
    return TrainingState(NumpyLearner(load_corpus(), SETTINGS), SETTINGS)


@pytest.fixture
def fresh(state: TrainingState) -> TrainingState:
    for name in ("seen", "applied"):
        state.tree[name][:] = 0
    state.tree["whole_passes"] = 0
    return state


def means(state: TrainingState, step: int, parts: list[Any]) -> dict[str, Any]:
    """Those of some micro-batches, as a run computes them: weighted by their samples."""
    total = len(state.order(step))
    seen = sum(len(part) * state.gradients(step, part)[1]["seen"] for part in parts) / total
    return {"weights": {}, "seen": seen}


def cut(state: TrainingState, step: int) -> list[Any]:
    order = state.order(step)
    return [order[place : place + SETTINGS.microbatch] for place in range(0, len(order), SETTINGS.microbatch)]


def test_every_sample_of_a_pass_counts_once(fresh: TrainingState) -> None:
    for step in range(1, SETTINGS.steps + 1):
        fresh.apply(step, means(fresh, step, cut(fresh, step)), 4.0)
    assert fresh.summary()["whole_passes"] == SETTINGS.passes == 3
    assert fresh.summary()["applied"] == [1, 1]


@pytest.mark.parametrize("fault", ["a lost micro-batch", "one added twice"])
def test_a_micro_batch_that_does_not_count_once_is_noticed(fresh: TrainingState, fault: str) -> None:
    for step in range(1, SETTINGS.steps_per_pass + 1):
        parts = cut(fresh, step)
        if step == 1:
            parts = parts[1:] if fault == "a lost micro-batch" else [*parts, parts[0]]
        fresh.apply(step, means(fresh, step, parts), 4.0)
    assert fresh.summary()["whole_passes"] == 0


def test_a_step_that_is_applied_twice_is_noticed(fresh: TrainingState) -> None:
    for step in (1, 2, 2):
        fresh.apply(step, means(fresh, step, cut(fresh, step)), 4.0)
    assert fresh.summary()["applied"] == [0, 2]


def test_a_pass_is_a_permutation_and_the_next_one_is_another(state: TrainingState) -> None:
    steps = SETTINGS.steps_per_pass
    first, second = (np.concatenate([state.order(base + step) for step in range(1, steps + 1)]) for base in (0, steps))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(SETTINGS.samples))
    assert first.tolist() != second.tolist()


def test_the_seed_decides_the_order() -> None:
    learner = NumpyLearner(load_corpus(), SETTINGS)
    first, again, other = (TrainingState(learner, Settings(steps=6, seed=seed)).order(1).tolist() for seed in (0, 0, 1))
    assert first == again
    assert first != other
