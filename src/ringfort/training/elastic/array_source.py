"""`ArraySource`: what a step is made of for a program that hands over its gradients as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringfort.errors import InvalidArgumentError
from ringfort.training.elastic.local_sum import LocalSum, checked_count, checked_loss
from ringfort.training.elastic.participant import Participant
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.step import Done, Turn


class TurnSource:
    """What sources have in common: the micro-batches of a run."""

    def __init__(self, run: Participant) -> None:
        self._run = run

    def advance(self) -> Turn | Done | None:
        """Return what the program has to do next; None after the last step."""
        return self._run.advance()

    def samples_of(self, turn: Turn) -> Array:
        """Return the samples of a micro-batch, and begin to measure the time that it takes."""
        return self._run.samples_of(turn)

    def random_of(self, turn: Turn) -> np.random.Generator:
        """Return a new random generator for a micro-batch."""
        return self._run.random_of(turn)

    def sealed(self, done: Done) -> None:
        """The program gets a step to apply."""

    def applied(self, done: Done) -> None:
        """The program has applied it."""


class ArraySource(TurnSource):
    """The source of the steps of one program, whose local sum is `local`."""

    def __init__(self, run: Participant, local: LocalSum) -> None:
        super().__init__(run)
        self._local = local

    def add(self, turn: Turn, gradients: Any, count: float | None, loss: float) -> None:
        """Add the gradients of a micro-batch to the local sum. If it raises an error, nothing was added: a program that
        catches it adds the micro-batch again.

        A signal handler may raise an error in the middle, which a program may catch too. Then that is found out here:
        sums cannot be taken apart, so without this check a part of a micro-batch would count twice.
        """
        run, local = self._run, self._local
        if run.has_added(turn):
            return
        if local.is_adding:
            why = "step.add(...) was interrupted, so the sum of this machine is damaged; leave the run"
            raise InvalidArgumentError("step", turn.compute.step, why)
        loss = checked_loss(loss)
        count = checked_count(run.meter.samples if count is None else count)
        run.begin()
        weight = local.add(gradients, count, run.unit_of(turn))
        local.loss += weight * loss if weight else 0.0
        run.added(turn)
        local.is_adding = False

    def mean_of(self, done: Done) -> Any:
        """Return the mean gradients of a sealed step."""
        local = self._local
        if done.is_overtaken:
            if local.layout is None:
                raise InvalidArgumentError("step", done.result.step, "no micro-batch was computed here")
            local.clear()
            return local.mean(local.buffers, 1.0)
        if done.weight == 1:
            self._run.lend(done.result, "step.mean()")
        return local.mean(done.result.payload, done.weight)
