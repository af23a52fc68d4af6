"""The demo without torch: `join`, a share of each batch, `average_gradients`. So looks a data-parallel program of one's
own, in any framework."""

from __future__ import annotations

import numpy as np

import ringfort
from ringfort.config import DistributedConfig
from ringfort.context import DistributedContext
from ringfort.demo.learner import PROMPT
from ringfort.demo.model import CONTEXT, Adam, digest, forward, generate, gradients, mean_loss, new_weights
from ringfort.demo.settings import Settings
from ringfort.demo.text import Corpus, global_batch, share, windows
from ringfort.training import average_gradients

VALIDATION_SAMPLES = 4096


def meet(peers: int) -> DistributedContext:
    """The group of `peers` processes that find each other. Over encrypted connections, as between machines, though
    processes of one machine could share memory: that is what the demo is to show."""
    over_the_wire = DistributedConfig(shared_memory="off")
    return ringfort.join(peers - 1, group=over_the_wire) if peers > 1 else ringfort.init(world_size=1, rank=0)


class NumpyLearner:
    """See `Learner`."""

    def __init__(self, ctx: DistributedContext, corpus: Corpus, settings: Settings) -> None:
        self._ctx, self._corpus, self._settings = ctx, corpus, settings
        self._weights = new_weights(len(corpus.vocabulary), settings.seed)
        self._adam = Adam(settings.steps)

    def step(self, step: int) -> float:
        """One step."""
        ctx, codes, settings = self._ctx, self._corpus.train, self._settings
        starts = global_batch(codes, CONTEXT, settings.batch, seed=settings.seed, step=step)
        context, target = windows(codes, CONTEXT, share(starts, ctx.rank, ctx.world_size))
        seen = forward(self._weights, context)
        slopes = gradients(self._weights, context, target, seen)
        # The loss rides with the gradients: it is a mean over the samples just as they are.
        loss, slopes = average_gradients(ctx, (mean_loss(seen, target), slopes), weight=len(target))
        self._adam.update(self._weights, slopes)
        return float(loss)

    def validate(self) -> float:
        """The loss on text that is never trained on."""
        codes = self._corpus.validation
        starts = np.linspace(0, len(codes) - CONTEXT - 1, VALIDATION_SAMPLES).astype(np.int64)
        context, target = windows(codes, CONTEXT, share(starts, self._ctx.rank, self._ctx.world_size))
        loss = mean_loss(forward(self._weights, context), target)
        return float(average_gradients(self._ctx, [loss], weight=len(target))[0])

    def digest(self) -> str:
        """Of all weights."""
        return digest(self._weights)

    def write(self, length: int) -> str:
        """Text."""
        prompt = self._corpus.encode(PROMPT)
        return self._corpus.decode(generate(self._weights, prompt, length, seed=self._settings.seed))
