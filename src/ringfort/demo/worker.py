"""One peer of the demo: `python -m ringfort.demo.worker SETTINGS ROLE` trains, and reports to its parent.

`train` is the part that people write: a training loop with `ringfort.elastic`. The rest reports what happens.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from typing import Literal

import msgspec

import ringfort
from ringfort.config import AutoDiscoveryConfig
from ringfort.demo.learner import PROMPT, Learner
from ringfort.demo.settings import ABSENCE, Settings
from ringfort.demo.text import load_corpus
from ringfort.demo.training_state import TrainingState
from ringfort.launch.local_ranks import report

Role = Literal["peer", "again", "alone"]
"""A peer of the run; the same after it was killed; a process that trains without others."""

REPORT_SECONDS = 0.2
"""Between two reports: as often as a person can read, at a cost that is small compared with a step."""
SAMPLE_CHARACTERS = 320


def train(state: TrainingState, settings: Settings, role: Role) -> None:
    """Train with whoever is there."""
    progress = Progress(settings, role)
    config = AutoDiscoveryConfig(interfaces=("127.0.0.1",), program="demo")
    with ringfort.elastic(state.tree, nodes=settings.nodes, name="demo", config=config) as run:
        data = {"samples": settings.samples, "batch": settings.batch, "microbatch": settings.microbatch}
        for step in run.steps(settings.steps, **data, seed=settings.seed):
            for part in step:
                loss, gradients = state.gradients(step.number, part)
                step.add(gradients, loss=loss)
                progress.computed(len(part))
            state.apply(step.number, step.mean(), step.loss)
            progress.applied(step.number, step.loss, len(run.members))


def train_alone(state: TrainingState, settings: Settings) -> None:
    """Train without ringfort: whole batches, one after the other."""
    progress = Progress(settings, "alone")
    for step in range(1, settings.steps + 1):
        order = state.order(step)
        loss, gradients = state.gradients(step, order)
        progress.computed(len(order))
        state.apply(step, gradients, loss)
        progress.applied(step, loss, 1)


class Progress:
    """Reports how far this peer is, and slows the run down while a peer is missing."""

    def __init__(self, settings: Settings, role: Role) -> None:
        self._settings = settings
        self._kill_at = None if role == "alone" else settings.kill_at
        self._has_lost = role == "again"
        self._members = -1
        self._samples = 0
        self._then = time.monotonic()

    def computed(self, samples: int) -> None:
        """This peer has computed a micro-batch."""
        self._samples += samples

    def applied(self, step: int, loss: float, members: int) -> None:
        """A step was applied at this peer. `members` is 0 while it copies the state."""
        now, is_change = time.monotonic(), members != self._members
        if is_change or now - self._then >= REPORT_SECONDS or step in (self._kill_at, self._settings.steps):
            rate = self._samples / max(1e-9, now - self._then)
            report(
                kind="progress", step=step, loss=loss, members=members, at=now, samples_per_second=rate, pid=os.getpid()
            )
            self._samples, self._then = 0, now
        is_short = 0 < members < self._settings.ranks
        self._has_lost |= is_short and self._kill_at is not None and step > self._kill_at
        self._members = members
        # So short a run would be over before a peer has started again, and before the parent has killed it.
        if self._kill_at is not None and (is_short or (step >= self._kill_at and not self._has_lost)):
            time.sleep(ABSENCE / self._settings.steps)


def run(settings: Settings, role: Role) -> None:
    """Train, and report the losses, the proof of this peer and a sample of text."""
    framework = import_module(f"ringfort.demo.with_{settings.framework}")
    learner: Learner = framework.learner(load_corpus(), settings)
    state = TrainingState(learner, settings)
    before = learner.validate()
    report(kind="started", pid=os.getpid())
    if role == "alone":
        train_alone(state, settings)
    else:
        train(state, settings, role)
    report(
        kind="result",
        losses=state.tree["losses"].tolist(),
        validation=[before, learner.validate()],
        sample=PROMPT + learner.write(SAMPLE_CHARACTERS),
        **state.summary(),
    )


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Settings), msgspec.convert(sys.argv[2], Role))
