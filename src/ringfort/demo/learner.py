"""`Learner`: the model of one rank of the demo, with NumPy or with torch, and its share of every batch."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ringfort.context import DistributedContext
from ringfort.demo.settings import Settings
from ringfort.demo.text import Codes, Corpus, global_batch, share, windows

PROMPT = "If the object is a function, "
"""The beginning of the text that the model writes: longer than the context of the NumPy model."""


class Learner(ABC):
    """One rank's model, and its share of every batch."""

    context: ClassVar[int]
    """Characters that the model sees."""
    validation_samples: ClassVar[int]

    def __init__(self, ctx: DistributedContext, corpus: Corpus, settings: Settings) -> None:
        self.ctx, self.corpus, self.settings = ctx, corpus, settings

    def batch(self, step: int) -> tuple[Codes, Codes]:
        """This rank's share of the batch of `step`: contexts, and the character that follows each."""
        codes, settings = self.corpus.train, self.settings
        starts = global_batch(codes, self.context, settings.batch, seed=settings.seed, step=step)
        return windows(codes, self.context, share(starts, self.ctx.rank, self.ctx.world_size))

    def validation_batch(self) -> tuple[Codes, Codes]:
        """This rank's share of a fixed sample of the text that is never trained on."""
        codes = self.corpus.validation
        starts = np.linspace(0, len(codes) - self.context - 1, self.validation_samples).astype(np.int64)
        return windows(codes, self.context, share(starts, self.ctx.rank, self.ctx.world_size))

    @abstractmethod
    def step(self, step: int) -> float:
        """Make one step of data-parallel training. Returns the loss over the whole batch, the same on every rank."""

    @abstractmethod
    def validate(self) -> float:
        """The mean loss over the validation samples of all ranks."""

    @abstractmethod
    def weights(self) -> Mapping[str, NDArray[Any]]:
        """All weights by name."""

    @abstractmethod
    def probabilities(self, codes: Codes) -> NDArray[Any]:
        """The probability of each character to follow `codes`, which are at most `context` characters."""

    def write(self, length: int) -> str:
        """`length` characters that follow the prompt."""
        prompt = self.corpus.encode(PROMPT)
        written = generate(self.probabilities, prompt, length, context=self.context, seed=self.settings.seed)
        return self.corpus.decode(written)


def digest(weights: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 of every bit of every weight."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode())
        total.update(np.ascontiguousarray(weights[name]).tobytes())
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
