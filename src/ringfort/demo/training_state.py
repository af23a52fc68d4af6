"""`TrainingState`: all that a peer of the demo needs to continue: weights, optimizer, and counters for the proof."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringfort.demo.learner import Learner, Weights, digest
from ringfort.demo.settings import Settings
from ringfort.demo.text import Codes
from ringfort.training.elastic.sample_order import sample_order


class TrainingState:
    """The state of the run as `ringfort.elastic` takes it, and the changes that one step makes.

    The counters are in the state, so that a peer that comes back gets them with the weights: at the end each peer can
    tell how often every step and every sample was applied to what it has.
    """

    def __init__(self, learner: Learner, settings: Settings) -> None:
        weights = learner.weights()
        self._learner, self._settings = learner, settings
        self.tree: dict[str, Any] = {
            "weights": weights,
            "first": {name: np.zeros_like(weight) for name, weight in weights.items()},
            "second": {name: np.zeros_like(weight) for name, weight in weights.items()},
            "losses": np.zeros(settings.steps),
            "applied": np.zeros(settings.steps, np.int32),
            "seen": np.zeros(settings.samples, np.int32),
            "whole_passes": 0,
        }

    def gradients(self, step: int, part: Codes) -> tuple[float, dict[str, Any]]:
        """The mean loss of a micro-batch, and what is averaged over all of them."""
        loss, slopes = self._learner.gradients(*self._learner.samples(part))
        # A mark for each sample of the step that is in this micro-batch. The marks become sums in `apply`, because a
        # mean weights them by the number of samples.
        order, marks = self.order(step), np.zeros(self._settings.batch, np.float32)
        marks[: len(order)] = np.isin(order, part) / len(part)
        return loss, {"weights": slopes, "seen": marks}

    def apply(self, step: int, means: dict[str, Any], loss: float) -> None:
        """Make a step with what was averaged."""
        tree = self.tree
        rate = self._learner.rate(step)
        adam(tree["weights"], tree["first"], tree["second"], means["weights"], step=step, rate=rate)
        tree["losses"][step - 1] = loss
        tree["applied"][step - 1] += 1
        order = self.order(step)
        # The sums of the marks are 0, 1, 2 and so on, up to rounding.
        tree["seen"][order] += np.rint(means["seen"][: len(order)] * len(order)).astype(np.int32)
        if step % self._settings.steps_per_pass == 0:
            passes = step // self._settings.steps_per_pass
            tree["whole_passes"] += bool((tree["seen"] == passes).all())

    def order(self, step: int) -> Codes:
        """The samples of a step: the same everywhere, because the order depends on the seed alone."""
        settings = self._settings
        number, place = divmod(step - 1, settings.steps_per_pass)
        begin = place * settings.batch
        end = min(begin + settings.batch, settings.samples)
        return sample_order(settings.seed, number, settings.samples, begin, end)

    def summary(self) -> dict[str, Any]:
        """What the proof needs of this peer."""
        tree = self.tree
        arrays: dict[str, NDArray[Any]] = {name: tree[name] for name in ("losses", "applied", "seen")}
        for kind in ("weights", "first", "second"):
            arrays |= {f"{kind} {name}": array for name, array in tree[kind].items()}
        return {
            "digest": digest(arrays),
            "applied": [int(tree["applied"].min()), int(tree["applied"].max())],
            "whole_passes": tree["whole_passes"],
        }


def adam(weights: Weights, first: Weights, second: Weights, slopes: Weights, *, step: int, rate: float) -> None:
    """Move `weights` in place, as Kingma and Ba (2015), with the usual constants. `step` counts from 1."""
    scale = np.float32(rate * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step))
    for name, slope in slopes.items():
        first[name] += np.float32(0.1) * (slope - first[name])
        second[name] += np.float32(0.001) * (slope * slope - second[name])
        weights[name] -= scale * first[name] / (np.sqrt(second[name]) + np.float32(1e-8))
