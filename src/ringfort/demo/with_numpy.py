"""The demo without torch: `join`, a share of each batch, `average_gradients`.

A data-parallel program in any framework looks like this. The model is a small character-level language model:
embedding, two hidden layers, softmax, Adam; derivatives by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

import ringfort
from ringfort.context import DistributedContext
from ringfort.demo.learner import Learner
from ringfort.demo.settings import Settings
from ringfort.demo.text import Codes, Corpus
from ringfort.training import average_gradients

Floats = NDArray[np.float32]
Weights = dict[str, Floats]

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


def mean_loss(seen: Activations, target: Codes) -> Floats:
    """The mean cross-entropy in nats, as a zero-dimensional array."""
    return np.asarray(-np.log(seen.probabilities[np.arange(len(target)), target]).mean(), dtype=np.float32)


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


@dataclass
class Adam:
    """Kingma and Ba (2015), with the usual constants and a rate that falls linearly to a tenth."""

    steps: int
    rate: float = 3e-3
    _first: Weights = field(default_factory=dict[str, Floats])
    _second: Weights = field(default_factory=dict[str, Floats])
    _step: int = 0

    def update(self, weights: Weights, slopes: Weights) -> None:
        """Move `weights` in place."""
        rate = self.rate * (1 - 0.9 * self._step / self.steps)
        self._step += 1
        scale = np.float32(rate * (1 - 0.999**self._step) ** 0.5 / (1 - 0.9**self._step))
        for name, slope in slopes.items():
            first = self._first.setdefault(name, np.zeros_like(slope))
            second = self._second.setdefault(name, np.zeros_like(slope))
            first += np.float32(0.1) * (slope - first)
            second += np.float32(0.001) * (slope * slope - second)
            weights[name] -= scale * first / (np.sqrt(second) + np.float32(1e-8))


def meet(peers: int) -> DistributedContext:
    """The group of `peers` processes that find each other."""
    return ringfort.join(peers - 1) if peers > 1 else ringfort.init(world_size=1, rank=0)


class NumpyLearner(Learner):
    """See `Learner`."""

    context: ClassVar[int] = CONTEXT
    validation_samples: ClassVar[int] = 4096

    def __init__(self, ctx: DistributedContext, corpus: Corpus, settings: Settings) -> None:
        super().__init__(ctx, corpus, settings)
        self._weights = new_weights(len(corpus.vocabulary), settings.seed)
        self._adam = Adam(settings.steps)

    def step(self, step: int) -> float:
        context, target = self.batch(step)
        seen = forward(self._weights, context)
        slopes = gradients(self._weights, context, target, seen)
        # The loss is averaged with the gradients: it is a mean over the samples just as they are.
        loss, slopes = average_gradients(self.ctx, (mean_loss(seen, target), slopes), weight=len(target))
        self._adam.update(self._weights, slopes)
        return float(loss)

    def validate(self) -> float:
        context, target = self.validation_batch()
        loss = mean_loss(forward(self._weights, context), target)
        return float(average_gradients(self.ctx, [loss], weight=len(target))[0])

    def weights(self) -> Weights:
        return self._weights

    def probabilities(self, codes: Codes) -> Floats:
        return forward(self._weights, codes[None]).probabilities[0]


learner = NumpyLearner
