"""`Learner`: the model of one rank of the demo, with NumPy or with torch, and its share of every batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

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
    def digest(self) -> str:
        """SHA-256 of every bit of every weight."""

    @abstractmethod
    def write(self, length: int) -> str:
        """`length` characters that follow the prompt."""
