"""The state of the demo counts what was applied to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringfort.demo.settings import Settings
from ringfort.demo.text import load_corpus
from ringfort.demo.training_state import TrainingState, adam
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


@pytest.mark.parametrize("part", ["weights", "first", "second", "losses", "applied", "seen"])
def test_the_digest_is_of_everything_that_the_proof_speaks_of(fresh: TrainingState, part: str) -> None:
    before = fresh.summary()["digest"]
    found = fresh.tree[part]
    array = found[next(iter(found))] if isinstance(found, dict) else found
    array.flat[-1] += 1
    after = fresh.summary()["digest"]
    array.flat[-1] -= 1
    assert after != before


def test_adam_is_that_of_the_paper() -> None:
    weights, first, second = ({"w": np.full(2, value, np.float32)} for value in (1.0, 0.0, 0.0))
    m = v = np.zeros(2)
    expected = np.ones(2)
    for step, slope in ((1, [0.5, -2.0]), (2, [0.25, 1.0]), (3, [-0.5, 0.0])):
        adam(weights, first, second, {"w": np.array(slope, np.float32)}, step=step, rate=0.01)
        m, v = 0.9 * m + 0.1 * np.array(slope), 0.999 * v + 0.001 * np.array(slope) ** 2
        expected = expected - 0.01 * (m / (1 - 0.9**step)) / np.sqrt(v / (1 - 0.999**step))
    assert weights["w"] == pytest.approx(expected, rel=1e-4)


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
