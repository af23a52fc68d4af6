"""One rank of the demo: `python -m ringfort.demo.worker SETTINGS` trains, and reports as JSON lines.

This is what a user's own data-parallel program looks like: `join`, a share of each batch, `average_gradients`.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

import ringfort
from ringfort.config import DistributedConfig
from ringfort.context import DistributedContext
from ringfort.demo.model import (
    CONTEXT,
    Adam,
    Weights,
    digest,
    forward,
    generate,
    gradients,
    mean_loss,
    new_weights,
)
from ringfort.demo.settings import BATCH, Settings
from ringfort.demo.text import Corpus, global_batch, load_corpus, share, windows
from ringfort.local import report
from ringfort.training import average_gradients

REPORT_SECONDS = 0.2
"""Between two reports: as often as a person can read, and nothing beside the cost of a step."""
VALIDATION_SAMPLES = 4096
PROMPT = "If the object is a function, "
SAMPLE_CHARACTERS = 320


def train_step(ctx: DistributedContext, corpus: Corpus, weights: Weights, adam: Adam, *, seed: int, step: int) -> float:
    """One step of data-parallel training; returns the loss over the whole batch, the same on every rank."""
    starts = global_batch(corpus.train, CONTEXT, BATCH, seed=seed, step=step)
    context, target = windows(corpus.train, CONTEXT, share(starts, ctx.rank, ctx.world_size))
    seen = forward(weights, context)
    slopes = gradients(weights, context, target, seen)
    # The loss rides with the gradients: it is a mean over the samples just as they are.
    loss, slopes = average_gradients(ctx, (mean_loss(seen, target), slopes), weight=len(target))
    adam.update(weights, slopes)
    return float(loss)


def validate(ctx: DistributedContext, corpus: Corpus, weights: Weights) -> float:
    """The mean loss over a fixed sample of the text that is never trained on; each rank does its share."""
    starts = np.linspace(0, len(corpus.validation) - CONTEXT - 1, VALIDATION_SAMPLES).astype(np.int64)
    context, target = windows(corpus.validation, CONTEXT, share(starts, ctx.rank, ctx.world_size))
    loss = mean_loss(forward(weights, context), target)
    return float(average_gradients(ctx, [loss], weight=len(target))[0])


class Progress:
    """Reports to the parent from time to time."""

    def __init__(self, ctx: DistributedContext) -> None:
        self._ctx = ctx
        self._samples = len(share(np.arange(BATCH), ctx.rank, ctx.world_size))
        self._last = (0, time.perf_counter())

    def tell(self, step: int, loss: float, *, final: bool) -> None:
        """`step` steps are done."""
        then_step, then = self._last
        now = time.perf_counter()
        if not final and now - then < REPORT_SECONDS:
            return
        moved = self._ctx.metrics_snapshot()
        report(
            kind="progress",
            rank=self._ctx.rank,
            pid=os.getpid(),
            step=step,
            loss=loss,
            samples_per_second=(step - then_step) * self._samples / (now - then),
            bytes_sent=moved.bytes_sent,
            bytes_received=moved.bytes_received,
        )
        if step > then_step:
            self._last = (step, now)


def meet(peers: int) -> DistributedContext:
    """The group of `peers` processes that find each other. Over encrypted connections, as between machines, though
    processes of one machine could share memory: that is what the demo is to show."""
    over_the_wire = DistributedConfig(shared_memory="off")
    return ringfort.join(peers - 1, group=over_the_wire) if peers > 1 else ringfort.init(world_size=1, rank=0)


def run(settings: Settings, peers: int) -> None:
    """Train, and report the curve, the digests of all ranks' weights and a sample of text."""
    corpus = load_corpus()
    with meet(peers) as ctx:
        weights = new_weights(len(corpus.vocabulary), settings.seed)
        adam = Adam(settings.steps)
        progress = Progress(ctx)
        before = validate(ctx, corpus, weights)
        losses: list[float] = []
        start = time.perf_counter()
        for step in range(settings.steps):
            losses.append(train_step(ctx, corpus, weights, adam, seed=settings.seed, step=step))
            progress.tell(step + 1, losses[-1], final=step + 1 == settings.steps)
        seconds = time.perf_counter() - start
        after = validate(ctx, corpus, weights)
        digests = ctx.all_gather_object(digest(weights))
        if ctx.is_master:
            text = corpus.decode(generate(weights, corpus.encode(PROMPT), SAMPLE_CHARACTERS, seed=settings.seed))
            report(
                kind="result",
                losses=losses,
                validation=[before, after],
                digests=digests,
                seconds=seconds,
                sample=PROMPT + text,
            )


if __name__ == "__main__":
    run(Settings.from_json(sys.argv[1]), int(sys.argv[2]))
