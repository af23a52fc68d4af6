"""Rounds of local steps for programs whose state is arrays: `ringfort.elastic(state, sync="local")`.

The arrays of floats in the state are the weights. The program changes them in place for each micro-batch. The run has
the global weights beside them, writes these into the state when a round is sealed, and sends and saves these.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import numpy as np

from ringfort.collectives.arrays import ArrayView
from ringfort.compression.floats import count_nonfinite
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.training.elastic.array_source import TurnSource
from ringfort.training.elastic.digests import Inspection
from ringfort.training.elastic.local_sum import Gradient, Layout, checked_count, checked_loss
from ringfort.training.elastic.participant import Participant
from ringfort.training.elastic.rounds import WORDS, RoundPlan, RoundReduction, RoundSettings
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.spare_memory import SpareMemory
from ringfort.training.elastic.state_tree import Manifest, Slot, StateTree
from ringfort.training.elastic.step import Done, Turn
from ringfort.training.local_steps.outer import OuterOptimizer
from ringfort.training.local_steps.weights_view import WeightsView

_PROGRAM: Final = "program"
"""The part of the state that is the program's."""


class RoundTree(StateTree):
    """The state of a run with local steps: the program's, with the global weights in place of its own; the momentum of
    the outer optimizer; and how the next rounds go."""

    def __init__(self, tree: Any, settings: RoundSettings) -> None:
        """Raise `InvalidArgumentError` if there is nothing to average, besides what `StateTree` raises."""
        self.reduction = RoundReduction(settings)
        self.is_moved = False
        """Whether the program's weights have made local steps since the last round."""
        super().__init__(tree)

    def _remember_first(self) -> None:
        weights = {slot.path: slot.child for slot in self._weights()}
        if not weights:
            why = "has no array of floats, so there is nothing to average with local steps"
            raise InvalidArgumentError("state", type(self._tree).__name__, why)
        self._view = WeightsView(weights)
        self.outer = OuterOptimizer(self._view.read(weights))
        super()._remember_first()

    @property
    def planned_steps(self) -> int:
        """The optimizer steps of a round that is opened now."""
        return self.reduction.plan.steps

    @property
    def size(self) -> int:
        """The number of weights."""
        return self._view.size

    @property
    def kind(self) -> Any:
        """The element type of the global weights: float64 if one of the program's arrays is, else float32."""
        return self._view.dtype.name

    def _weights(self) -> Iterator[Slot]:
        """Yield the places of the weights in the program's tree."""
        for slot in super()._slots(self._tree):
            leaf = self._leaf(slot, needs_data=False)
            if isinstance(leaf, ArrayView) and leaf.kind.kind == "f":
                yield slot

    # --- local steps --------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Give the program the global weights."""
        self._put(self.outer.weights)
        self.is_moved = False

    def _put(self, weights: Array) -> None:
        slots = list(self._weights())
        held = {slot.path: slot.child for slot in slots}
        for slot, array in zip(slots, self._view.write(weights, held).values(), strict=True):
            if array is not slot.child:  # one that cannot be written (MLX, JAX)
                slot.holder[slot.key] = array

    def _held(self) -> dict[str, Any]:
        return {slot.path: slot.child for slot in self._weights()}

    def take_over(self) -> None:
        """Make what the program has written into its weights since the last round the global weights. All members do
        the same."""
        change = self._view.difference(self.outer.weights, self._held())
        changed = change != 0  # NaN too
        if changed.any():
            self.outer.weights[changed] = self._view.read(self._held())[changed]

    def difference(self, weight: float, into: Array) -> None:
        """Write what the local steps have changed, times `weight`."""
        if not self.is_moved or not weight:
            into.fill(0)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(self._view.difference(self.outer.weights, self._held()), weight, out=into, dtype=into.dtype)

    @contextmanager
    def shown(self) -> Generator[None]:
        """Have the global weights in the program's state for a while."""
        own = self._view.read(self._held()) if self.is_moved else None
        if own is not None:
            self._put(self.outer.weights)
        try:
            yield
        finally:
            if own is not None:
                self._put(own)

    # --- as StateTree needs it ----------------------------------------------------------------------------------------

    def misfit(self, manifest: Manifest) -> str:
        """Return in words why an image with that manifest is not of this program's state; empty if it can be loaded. It
        must have the same leaves: none are created later."""
        return super().misfit(manifest) or self.manifest().differences(manifest)

    def _root(self) -> Any:
        paths = [slot.path for slot in self._weights()]
        weights, velocity = (
            dict(zip(paths, self._cut(flat), strict=True)) for flat in (self.outer.weights, self.outer.velocity)
        )
        program = {slot.path: slot.child for slot in super()._slots(self._tree)} | weights
        return {_PROGRAM: program, "outer": velocity, "plan": list(self.reduction.plan.words)}

    def _cut(self, flat: Array) -> Iterator[Array]:
        begin = 0
        for slot in self._weights():
            shape = tuple(cast("ArrayView", self._leaf(slot, needs_data=False)).shape)
            end = begin + int(np.prod(shape, dtype=int))
            yield flat[begin:end].reshape(shape)
            begin = end

    def _take(self, tree: Any) -> None:
        """Give the program what is no weight and could not be written in place, and the global weights."""
        found = tree[_PROGRAM]
        weights = {slot.path for slot in self._weights()}
        for slot in list(super()._slots(self._tree)):
            if slot.path not in weights and found[slot.path] is not slot.child:
                slot.holder[slot.key] = found[slot.path]
        self.reduction.plan = RoundPlan.of(tree["plan"])
        self.restore()


class RoundSum:
    """What local steps have changed, as the sum of one member: a `GradientSum`."""

    def __init__(self, tree: RoundTree) -> None:
        self._tree = tree
        self.host_copies = 3
        """The sum, and the results of the last round and of the next."""
        self.device_bytes = 0
        self.loss = 0.0
        self.count = 0.0
        kinds = Gradient("plan", tree.kind, (WORDS,)), Gradient("weights", tree.kind, (tree.size,))
        self.layout: Layout | None = Layout(kinds, {one.path: None for one in kinds})
        self._own = np.zeros(WORDS + tree.size, tree.kind)
        self._results = SpareMemory()

    def fits(self, layout: Layout) -> bool:
        """Return whether that is this program's layout."""
        return self.layout == layout

    def prepare(self, layout: Layout) -> None:
        """Raise `GradientLayoutError` if the run's layout is not this program's."""
        assert self.layout is not None
        self.layout.check(layout)

    def begin(self) -> None:
        """Begin another round, of which something will be added."""
        self.clear()

    def clear(self) -> None:
        """Begin another round with the global weights."""
        self.count, self.loss = 0.0, 0.0
        if self._tree.is_moved:
            self._tree.restore()

    def expect(self, context: DistributedContext) -> None:
        """Do nothing: there is nothing to send before the last local step."""

    def forget(self) -> None:
        """Do nothing: nothing was begun."""

    def reduce(self, context: DistributedContext) -> dict[str, Array]:
        """Add up the differences of all members, out of place."""
        self._own[:WORDS] = 0
        change = self._own[WORDS:]
        self._tree.difference(self.count, change)
        if count_nonfinite(change):  # all members find it in the exact part
            self._own[:WORDS], change[...] = np.nan, 0
        total = self._results.take(self._tree.kind, self._own.size)
        np.copyto(total, self._own)
        self._tree.reduction.add_up(context, total[:WORDS], [total[:WORDS]], total[WORDS:])
        self._tree.reduction.reduced(total)
        return {self._tree.kind: total}

    def inspection(self) -> Inspection | None:
        """Return None: a result comes as a whole."""

    def own(self) -> dict[str, Array]:
        """Return this member's sum."""
        return {self._tree.kind: self._own}


class RoundSource(TurnSource):
    """The source of the rounds of one program."""

    def __init__(self, run: Participant, tree: RoundTree, sums: RoundSum) -> None:
        super().__init__(run)
        self._tree = tree
        self._sums = sums
        tree.reduction.step_seconds = run.part_seconds

    def samples_of(self, turn: Turn) -> Array:
        """Return the samples of a local step. The first one of a round begins with the global weights."""
        self._run.begin()
        self._tree.is_moved = True  # from now on, whether the program finishes this one or not
        return super().samples_of(turn)

    def add(self, turn: Turn, gradients: Any, count: float | None, loss: float) -> None:
        """The program has made a local step, over samples that weigh `count`."""
        run, sums = self._run, self._sums
        if gradients is not None:
            why = "is not used with local steps: change the weights in the state, then call step.add()"
            raise InvalidArgumentError("gradients", type(gradients).__name__, why)
        if run.has_added(turn):
            return
        loss = checked_loss(loss)
        weight = checked_count(run.meter.samples if count is None else count) / run.unit_of(turn)
        sums.count += weight
        sums.loss += weight * loss if weight else 0.0
        run.added(turn)

    def sealed(self, done: Done) -> None:
        """Move the global weights by a sealed round, and write them into the state. A round without a mean changes no
        weights: the local steps of all members are dropped."""
        tree = self._tree
        if done.is_finite and not done.is_empty and not done.is_overtaken:
            total = cast("dict[str, Array]", done.result.payload)[tree.kind]
            plan = tree.reduction.sealed(total, total[:WORDS].tolist())
            mean = np.divide(total[WORDS:], done.weight, dtype=total.dtype)
            tree.outer.step(mean, tree.reduction.settings.outer.of_round(plan.every, plan.codec))
        tree.restore()

    def applied(self, done: Done) -> None:
        """The program has done what it does between two rounds."""
        if not done.is_overtaken:
            self._tree.take_over()

    def mean_of(self, done: Done) -> Any:
        """Raise `InvalidArgumentError`: the run has applied the round itself."""
        why = "has no mean for the program: with local steps the run averages the weights in the state itself"
        raise InvalidArgumentError("step", done.result.step, why)
