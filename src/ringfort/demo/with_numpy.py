"""The demo without torch: `join`, a share of each batch, `average_gradients`.

A data-parallel program in any framework looks like this.
"""

from __future__ import annotations

from typing import ClassVar

import ringfort
from ringfort.context import DistributedContext
from ringfort.demo import model
from ringfort.demo.learner import PROMPT, Learner
from ringfort.demo.model import Adam, forward, generate, gradients, mean_loss, new_weights
from ringfort.demo.settings import Settings
from ringfort.demo.text import Corpus
from ringfort.training import average_gradients


def meet(peers: int) -> DistributedContext:
    """The group of `peers` processes that find each other."""
    return ringfort.join(peers - 1) if peers > 1 else ringfort.init(world_size=1, rank=0)


class NumpyLearner(Learner):
    """See `Learner`."""

    context: ClassVar[int] = model.CONTEXT
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

    def digest(self) -> str:
        return model.digest(self._weights)

    def write(self, length: int) -> str:
        prompt = self.corpus.encode(PROMPT)
        return self.corpus.decode(generate(self._weights, prompt, length, seed=self.settings.seed))


learner = NumpyLearner
