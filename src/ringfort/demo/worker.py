"""One rank of the demo: `python -m ringfort.demo.worker SETTINGS PEERS` trains, and reports to its parent."""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module

import numpy as np

from ringfort.context import DistributedContext
from ringfort.demo.learner import PROMPT, Learner
from ringfort.demo.settings import Settings
from ringfort.demo.text import load_corpus, share
from ringfort.launch.local_ranks import report

REPORT_SECONDS = 0.2
"""Between two reports: as often as a person can read, at a cost that is small compared with a step."""
SAMPLE_CHARACTERS = 320


class Progress:
    """Reports the progress of this rank from time to time."""

    def __init__(self, ctx: DistributedContext, settings: Settings) -> None:
        self._ctx = ctx
        self._samples = len(share(np.arange(settings.batch), ctx.rank, ctx.world_size))
        self._last = (0, time.perf_counter())

    def tell(self, step: int, loss: float, *, final: bool) -> None:
        """Report that `step` steps are done."""
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


def run(settings: Settings, peers: int) -> None:
    """Train, and report the losses, the digests of all ranks' weights and a sample of text."""
    framework = import_module(f"ringfort.demo.with_{settings.framework}")
    corpus = load_corpus()
    with framework.meet(peers) as ctx:
        model: Learner = framework.learner(ctx, corpus, settings)
        progress = Progress(ctx, settings)
        before = model.validate()
        losses: list[float] = []
        start = time.perf_counter()
        for step in range(settings.steps):
            losses.append(model.step(step))
            progress.tell(step + 1, losses[-1], final=step + 1 == settings.steps)
        seconds = time.perf_counter() - start
        after = model.validate()
        digests = ctx.all_gather_object(model.digest())
        if ctx.is_master:
            report(
                kind="result",
                losses=losses,
                validation=[before, after],
                digests=digests,
                seconds=seconds,
                sample=PROMPT + model.write(SAMPLE_CHARACTERS),
            )


if __name__ == "__main__":
    run(Settings.from_json(sys.argv[1]), int(sys.argv[2]))
