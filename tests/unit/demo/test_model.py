"""The demo's model: right derivatives, deterministic weights, and text from it."""

from __future__ import annotations

import numpy as np
import pytest

from ringfort.demo.learner import digest, generate
from ringfort.demo.training_state import adam
from ringfort.demo.with_numpy import CONTEXT, forward, gradients, mean_loss, new_weights

VOCABULARY = 11


def batch(samples: int = 8) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.integers(0, VOCABULARY, (samples, CONTEXT)), random.integers(0, VOCABULARY, samples)


def loss_of(weights: dict[str, np.ndarray], context: np.ndarray, target: np.ndarray) -> float:
    return mean_loss(forward(weights, context), target)


@pytest.mark.parametrize("name", sorted(new_weights(VOCABULARY, 0)))
def test_the_gradient_is_the_slope_of_the_loss(name: str) -> None:
    weights = new_weights(VOCABULARY, 0)
    weights["output"] *= 50  # away from the flat start, so that every layer has a slope
    context, target = batch()
    slope = gradients(weights, context, target, forward(weights, context))[name]
    # Along the gradient itself: the change is then large enough for float32 to show.
    step = 1e-2 / np.linalg.norm(slope)
    up = {**weights, name: weights[name] + step * slope}
    down = {**weights, name: weights[name] - step * slope}
    measured = (loss_of(up, context, target) - loss_of(down, context, target)) / (2 * step)
    assert measured == pytest.approx(float(np.sum(slope**2)), rel=0.01)


def test_the_gradient_of_a_batch_is_the_mean_of_its_parts_weighted_by_their_samples() -> None:
    weights = new_weights(VOCABULARY, 0)
    context, target = batch(8)
    whole = gradients(weights, context, target, forward(weights, context))
    parts = [(context[:3], target[:3]), (context[3:], target[3:])]
    each = [(len(y), gradients(weights, x, y, forward(weights, x))) for x, y in parts]
    for name, slope in whole.items():
        combined = sum(count * part[name] for count, part in each) / 8
        np.testing.assert_allclose(combined, slope, rtol=1e-4, atol=1e-7)


def test_the_first_loss_is_that_of_a_blind_guess() -> None:
    context, target = batch(256)
    assert loss_of(new_weights(VOCABULARY, 0), context, target) == pytest.approx(np.log(VOCABULARY), rel=0.02)


def test_adam_learns_a_small_batch_by_heart() -> None:
    weights = new_weights(VOCABULARY, 0)
    first, second = ({name: np.zeros_like(weight) for name, weight in weights.items()} for _ in range(2))
    context, target = batch(8)
    for step in range(1, 61):
        slopes = gradients(weights, context, target, forward(weights, context))
        adam(weights, first, second, slopes, step=step, rate=3e-3 * (1 - 0.9 * (step - 1) / 60))
    assert loss_of(weights, context, target) < 0.1


def test_weights_are_the_same_for_one_seed_and_differ_for_another() -> None:
    assert digest(new_weights(VOCABULARY, 3)) == digest(new_weights(VOCABULARY, 3))
    assert digest(new_weights(VOCABULARY, 3)) != digest(new_weights(VOCABULARY, 4))


def test_the_digest_sees_a_single_bit() -> None:
    weights = new_weights(VOCABULARY, 0)
    before = digest(weights)
    weights["bias1"].view(np.uint32)[7] ^= 1
    assert digest(weights) != before


def test_generated_text_has_the_wanted_length_and_is_the_same_for_one_seed() -> None:
    weights = new_weights(VOCABULARY, 0)
    prompt = np.arange(CONTEXT) % VOCABULARY

    def write(seed: int) -> list[int]:
        return generate(
            lambda codes: forward(weights, codes[None]).probabilities[0], prompt, 20, context=CONTEXT, seed=seed
        ).tolist()

    assert len(write(5)) == 20
    assert write(5) == write(5)
    assert write(5) != write(6)
