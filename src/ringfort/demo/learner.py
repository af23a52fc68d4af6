"""`Learner`: the demo's model, with NumPy or with torch, and what is needed to train it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ringfort.demo.settings import Settings
from ringfort.demo.text import Codes, Corpus, windows

Floats = NDArray[np.float32]
Weights = dict[str, Floats]

PROMPT = "If the object is a function, "
"""The beginning of the text that the model writes: longer than the context of the NumPy model."""


class Learner(ABC):
    """A model, its data, and its learning rate."""

    context: ClassVar[int]
    """Characters that the model sees."""
    validation_samples: ClassVar[int]

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self.corpus, self.settings = corpus, settings
        self._starts = spread(len(corpus.train) - self.context, settings.samples)

    def samples(self, indices: Codes) -> tuple[Codes, Codes]:
        """Samples of the data set: contexts, and the character that follows each."""
        return windows(self.corpus.train, self.context, self._starts[indices])

    def validate(self) -> float:
        """The mean loss over a fixed sample of the text that is never trained on."""
        codes = self.corpus.validation
        starts = spread(len(codes) - self.context, self.validation_samples)
        return self.loss(*windows(codes, self.context, starts))

    @abstractmethod
    def weights(self) -> Weights:
        """All weights by name, to be changed in place."""

    @abstractmethod
    def gradients(self, context: Codes, target: Codes) -> tuple[float, Weights]:
        """The mean loss over some samples, and its derivative by each weight."""

    @abstractmethod
    def loss(self, context: Codes, target: Codes) -> float:
        """The mean loss over some samples."""

    @abstractmethod
    def rate(self, step: int) -> float:
        """The learning rate of a step, from 1."""

    @abstractmethod
    def probabilities(self, codes: Codes) -> NDArray[Any]:
        """The probability of each character to follow `codes`, which are at most `context` characters."""

    def write(self, length: int) -> str:
        """`length` characters that follow the prompt."""
        prompt = self.corpus.encode(PROMPT)
        written = generate(self.probabilities, prompt, length, context=self.context, seed=self.settings.seed)
        return self.corpus.decode(written)


def spread(length: int, count: int) -> Codes:
    """`count` places below `length`, evenly spaced."""
    return np.arange(count, dtype=np.int64) * length // count


def digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 of every bit of every array."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        total.update(name.encode())
        total.update(np.ascontiguousarray(arrays[name]).tobytes())
    return total.hexdigest()


def generate(
    probabilities: Callable[[Codes], NDArray[Any]], prompt: Codes, length: int, *, context: int, seed: int
) -> Codes:
    """Sample `length` characters that follow `prompt`; a temperature of 0.6 prefers the likely ones."""
    random = np.random.default_rng(seed)
    codes = list(prompt)
    for _ in range(length):
        odds = probabilities(np.array(codes[-context:])).astype(np.float64) ** (1 / 0.6)
        codes.append(random.choice(len(odds), p=odds / odds.sum()))
    return np.array(codes[len(prompt) :])
