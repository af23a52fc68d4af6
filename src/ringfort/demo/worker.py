"""One rank of the demo: `python -m ringfort.demo.worker SETTINGS PEERS` trains, and reports to its parent."""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module

import msgspec
import numpy as np

from ringfort.demo.learner import PROMPT, Learner, digest
from ringfort.demo.settings import Settings
from ringfort.demo.text import load_corpus, share
from ringfort.launch.local_ranks import report

REPORT_SECONDS = 0.2
"""Between two reports: as often as a person can read, at a cost that is small compared with a step."""
SAMPLE_CHARACTERS = 320


def run(settings: Settings, peers: int) -> None:
    """Train, and report the losses, the digests of all ranks' weights and a sample of text."""
    framework = import_module(f"ringfort.demo.with_{settings.framework}")
    corpus = load_corpus()
    with framework.meet(peers) as ctx:
        model: Learner = framework.learner(ctx, corpus, settings)
        samples = len(share(np.arange(settings.batch), ctx.rank, ctx.world_size))
        before = model.validate()
        losses: list[float] = []
        reported = 0
        start = then = now = time.perf_counter()
        for step in range(1, settings.steps + 1):
            losses.append(model.step(step - 1))
            now = time.perf_counter()
            if now - then >= REPORT_SECONDS or step == settings.steps:
                moved = ctx.metrics_snapshot()
                report(
                    kind="progress",
                    rank=ctx.rank,
                    pid=os.getpid(),
                    step=step,
                    loss=losses[-1],
                    samples_per_second=(step - reported) * samples / (now - then),
                    bytes_sent=moved.bytes_sent,
                    bytes_received=moved.bytes_received,
                )
                reported, then = step, now
        after = model.validate()
        digests = ctx.all_gather_object(digest(model.weights()))
        if ctx.is_master:
            report(
                kind="result",
                losses=losses,
                validation=[before, after],
                digests=digests,
                seconds=now - start,
                sample=PROMPT + model.write(SAMPLE_CHARACTERS),
            )


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Settings), int(sys.argv[2]))
