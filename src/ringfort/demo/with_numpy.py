"""The demo's model without torch: a small character-level language model, derivatives by hand.

Embedding, two hidden layers, softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ringfort.demo.learner import Floats, Learner, Weights
from ringfort.demo.settings import Settings
from ringfort.demo.text import Codes, Corpus

RATE = 3e-3
"""The learning rate of the first step; it falls linearly to a tenth."""
CONTEXT = 24
"""Characters that the model sees: four or five words."""
EMBEDDING = 16
HIDDEN = 256


def new_weights(vocabulary: int, seed: int) -> Weights:
    """The initial weights: the same on every rank for one seed. Variance 1/inputs keeps tanh out of saturation."""
    random = np.random.default_rng(seed)

    def matrix(inputs: int, outputs: int, scale: float) -> Floats:
        return (random.standard_normal((inputs, outputs)) * scale).astype(np.float32)

    inputs = CONTEXT * EMBEDDING
    return {
        "embedding": matrix(vocabulary, EMBEDDING, 1.0),
        "hidden1": matrix(inputs, HIDDEN, inputs**-0.5),
        "bias1": np.zeros(HIDDEN, np.float32),
        "hidden2": matrix(HIDDEN, HIDDEN, HIDDEN**-0.5),
        "bias2": np.zeros(HIDDEN, np.float32),
        # Near zero, so that the first guess is uniform and the first loss is ln(vocabulary).
        "output": matrix(HIDDEN, vocabulary, 0.01),
        "bias3": np.zeros(vocabulary, np.float32),
    }


@dataclass(frozen=True)
class Activations:
    """The results of the forward pass that the backward pass needs."""

    embedded: Floats
    hidden1: Floats
    hidden2: Floats
    probabilities: Floats


def forward(weights: Weights, context: Codes) -> Activations:
    """The probabilities of the next character for each row of `context`."""
    embedded = weights["embedding"][context].reshape(len(context), -1)
    hidden1 = np.tanh(embedded @ weights["hidden1"] + weights["bias1"])
    hidden2 = np.tanh(hidden1 @ weights["hidden2"] + weights["bias2"])
    logits = hidden2 @ weights["output"] + weights["bias3"]
    logits -= logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    return Activations(embedded, hidden1, hidden2, probabilities)


def mean_loss(seen: Activations, target: Codes) -> float:
    """The mean cross-entropy in nats."""
    return float(-np.log(seen.probabilities[np.arange(len(target)), target]).mean())


def gradients(weights: Weights, context: Codes, target: Codes, seen: Activations) -> Weights:
    """The derivative of the mean loss by each weight."""
    d_logits = seen.probabilities.copy()
    d_logits[np.arange(len(target)), target] -= 1
    d_logits /= len(target)
    d_hidden2 = (d_logits @ weights["output"].T) * (1 - seen.hidden2**2)
    d_hidden1 = (d_hidden2 @ weights["hidden2"].T) * (1 - seen.hidden1**2)
    d_embedded = (d_hidden1 @ weights["hidden1"].T).reshape(-1, EMBEDDING)
    # A matrix product with one-hot rows adds up the rows of equal characters; np.add.at is slower.
    one_hot = np.eye(len(weights["embedding"]), dtype=np.float32)[context.reshape(-1)]
    return {
        "embedding": one_hot.T @ d_embedded,
        "hidden1": seen.embedded.T @ d_hidden1,
        "bias1": d_hidden1.sum(axis=0),
        "hidden2": seen.hidden1.T @ d_hidden2,
        "bias2": d_hidden2.sum(axis=0),
        "output": seen.hidden2.T @ d_logits,
        "bias3": d_logits.sum(axis=0),
    }


class NumpyLearner(Learner):
    """See `Learner`."""

    context: ClassVar[int] = CONTEXT
    validation_samples: ClassVar[int] = 4096

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        super().__init__(corpus, settings)
        self._weights = new_weights(len(corpus.vocabulary), settings.seed)

    def weights(self) -> Weights:
        return self._weights

    def gradients(self, context: Codes, target: Codes) -> tuple[float, Weights]:
        seen = forward(self._weights, context)
        return mean_loss(seen, target), gradients(self._weights, context, target, seen)

    def loss(self, context: Codes, target: Codes) -> float:
        return mean_loss(forward(self._weights, context), target)

    def rate(self, step: int) -> float:
        return RATE * (1 - 0.9 * (step - 1) / self.settings.steps)

    def probabilities(self, codes: Codes) -> Floats:
        return forward(self._weights, codes[None]).probabilities[0]


learner = NumpyLearner
