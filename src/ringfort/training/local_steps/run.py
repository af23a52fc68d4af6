"""`LocalSteps`: each rank trains by itself for a round of local steps; then the ranks average what has become of the
weights. That takes hundreds of times fewer bytes than averaging gradients in every step.

    local = ringfort.LocalSteps(ctx, weights)
    while local.samples < 1_000_000:
        train_one_batch(weights)           # in place, at this rank's own speed
        local.step(samples=batch)          # at the end of a round: weights are the same bits at every rank

The ranks go through a round without any communication. At its end they tell each other in one small message what they
have done, add up their differences, and each moves the global weights by the mean (`OuterOptimizer`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

import numpy as np

from ringfort.collectives.ops import ReduceOp
from ringfort.compression import auto
from ringfort.compression.compressor import GradientCompressor
from ringfort.compression.floats import count_nonfinite
from ringfort.compression.strategy import CompressionStrategy
from ringfort.errors import InvalidArgumentError, NonFiniteError
from ringfort.telemetry.trace import own_trace
from ringfort.training.gradients import compare_listings
from ringfort.training.local_steps import choice
from ringfort.training.local_steps.choice import CODECS, DECIDE_AFTER, Costs, Decision
from ringfort.training.local_steps.outer import OuterOptimizer, OuterSettings
from ringfort.training.local_steps.pace import Pace, Weighting, check_weighting, shares, steps_of
from ringfort.training.local_steps.weights_view import WeightsView
from ringfort.transport.reducer import Array

if TYPE_CHECKING:
    from ringfort.context import DistributedContext

Codec = Literal["auto", "none", "int8", "int4", "sparse"]
Tree = TypeVar("Tree")
_FIRST: Final = 5
"""Local steps of the first round, after which the speeds of all ranks are known."""
_MOST: Final = 1_000_000
_NAME: Final = "difference"

logger = logging.getLogger("ringfort.local_steps")


class LocalSteps:
    """Averages the weights of all ranks at the end of each round of local steps."""

    def __init__(
        self,
        ctx: DistributedContext,
        tree: Any,
        *,
        every: int | Literal["auto"] = "auto",
        codec: Codec = "auto",
        weighting: Weighting = "samples",
        pace: Literal["time", "steps"] = "time",
        rounds: int | None = None,
        outer_rate: float | None = None,
        outer_momentum: float | None = None,
    ) -> None:
        """Begin with the weights of rank 0, which are written into every rank's tree.

        Args:
            ctx: the group.
            tree: the weights: nested dicts, lists and tuples of float arrays, as for `average_gradients`. Arrays that
                cannot be written (MLX, JAX) are replaced: read `local.tree`, and pass the new tree to `step`.
            every: local steps of the fastest rank in a round. `"auto"` measures steps, links and codecs, decides, and
                decides again every 20 rounds. `local.decision` and the logger `ringfort.local_steps` say why.
            codec: how differences are sent: `"none"` (exact), `"int8"`, `"int4"` or `"sparse"` (141 times fewer bytes
                than float32, and no outer momentum).
            weighting: how the ranks' differences count: by `"samples"`, `"uniform"`, or `"normalized"` by steps.
            pace: with `"time"` a slower rank makes fewer steps, so that all arrive together. With `"steps"` all make
                the same number.
            rounds: how many rounds the run has, if that is known. With fewer than 50 the plain mean is better than
                outer momentum, and used.
            outer_rate: of the outer step; by default 0.6, from five ranks on 0.8.
            outer_momentum: of the outer step; by default 0.9.

        Every rank must pass the same shapes, element types and settings: a difference raises `GradientMismatchError`
        at all ranks, with the first one. Raises `InvalidArgumentError` for invalid arguments and for arrays that are
        not of floats, and `UnsupportedArrayError` for leaves that are no arrays or cannot be read.
        """
        self.ctx = ctx
        self.tree = tree
        """The weights of this rank: the global ones after a round, and else what local steps have made of them."""
        self._every = None if every == "auto" else _whole("every", every, _MOST)
        self._codec = _codec(codec)
        self._weighting: Weighting = check_weighting(weighting)
        if pace not in ("time", "steps"):
            raise InvalidArgumentError("pace", pace, "must be time or steps")
        self._is_even = pace == "steps"
        self._rounds = None if rounds is None else _whole("rounds", rounds, 2**62)
        self._outer_asked = outer_rate, outer_momentum
        self._settings(is_sparse=False)  # checks them
        self.remove_hook: Callable[[], object] = lambda: None
        """Stops the counting of an optimizer's steps, if an optimizer counts them."""
        self._view = WeightsView(tree)
        self._group = ctx.group
        if ctx.world_size > 1:
            asked = f"every={every}, codec={codec}, weighting={weighting}, pace={pace}, rounds={rounds}"
            compare_listings(ctx, (f"{asked}, outer={self._outer_asked}", *self._view.listing))
        self._outer = OuterOptimizer(self._view.read(tree))
        self._compressor = GradientCompressor(CompressionStrategy.NONE)
        self._pace = Pace()
        self._since = time.perf_counter()
        self.number = 0
        """The rounds that have ended."""
        self.decision = self._first_decision()
        """How often the ranks reduce, with which codec, and why."""
        self.samples = 0.0
        """The samples of all ranks in the rounds that have ended: the same at every rank, so a loop over it ends at all
        of them together."""
        self._begin_at_root()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def step(self, tree: Tree | None = None, *, samples: float = 1) -> Tree:
        """Count one local step, over so many samples. In the last one of a round, reduce with the other ranks, and
        write the new global weights into the tree. Return the tree.

        A `tree` that is passed takes the place of the one before: needed where arrays cannot be written.

        Raises `InvalidArgumentError` if the weights have other shapes than before, `NonFiniteError` at every rank if
        one has weights that are infinite or not a number (`restart_round` then drops what all have done since the last
        round), and the errors of a collective. The global weights have not changed then.
        """
        number: object = samples
        if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) < float("inf"):
            raise InvalidArgumentError("samples", samples, "must be the number of samples, or of tokens, of this step")
        if self.ctx.group is not self._group:
            why = "has changed; make a new LocalSteps with these ranks, and load_state_dict() into it"
            raise InvalidArgumentError("ctx", "its group", why)
        self._take(tree)
        now = time.perf_counter()
        self._pace.took(now - self._since)
        self._since = now
        self._steps += 1
        self._own += float(samples)
        own_trace().mark(self.ctx)
        if self.ctx.world_size == 1:
            self.samples += float(samples)
        elif self._steps >= self._planned:
            self.end_round()
        return self.tree

    def end_round(self, tree: Tree | None = None) -> Tree:
        """End the round now, with the steps that were made. A collective: every rank calls it in the same round, such
        as at the end of a training that is not a whole number of rounds. If no rank has made a step since the last
        round, nothing changes. Return the tree.

        Raises what `step` raises.
        """
        self._take(tree)
        if self.ctx.world_size > 1:
            difference = self._view.difference(self._outer.weights, self.tree)
            rows = self._tell(difference)
            steps, samples = [int(row[0]) for row in rows], [float(row[1]) for row in rows]
            if any(steps):  # else the outer momentum would move the weights alone
                share = shares(self._weighting, steps, samples)[self.ctx.rank]
                self._reduce(difference, share, has_unsent=any(row[5] for row in rows))
                self.samples += sum(samples)
                self.number += 1
                self._decide(rows)
                seconds = [0.0 if self._is_even else float(row[2]) for row in rows]
                self._begin_round(steps_of(self.decision.every, seconds)[self.ctx.rank], sum(samples))
        self._since = time.perf_counter()
        return self.tree

    @property
    def ended_round(self) -> bool:
        """Whether the last `step` has ended a round, so that the weights are the global ones: alone they always are."""
        return self._steps == 0 or self.ctx.world_size == 1

    @property
    def samples_now(self) -> float:
        """`samples`, and an estimate of what all ranks have done since: for learning-rate schedules. It grows with
        every step of this rank, and is exact at the end of a round."""
        if self.ctx.world_size == 1:
            return self.samples
        share = min(1.0, self._steps / self._planned)
        return self.samples + (self._last_total * share or self._own * self.ctx.world_size)

    @contextmanager
    def global_weights(self) -> Generator[Any]:
        """Have the global weights in the tree, for an evaluation or a checkpoint: those of the last round, without the
        local steps since. After the block the tree has its own weights again. Gives the tree."""
        begun = time.perf_counter()
        if self.ctx.world_size == 1:
            yield self.tree
        else:
            own = self._view.read(self.tree)
            self.tree = self._view.write(self._outer.weights, self.tree)
            try:
                yield self.tree
            finally:
                self.tree = self._view.write(own, self.tree)
        self._since += time.perf_counter() - begun

    def restart_round(self) -> Any:
        """Drop the local steps of this round: write the global weights into the tree, and return it. A rank that does
        so alone arrives later than the others."""
        if self.ctx.world_size > 1:
            self.tree = self._view.write(self._outer.weights, self.tree)
            self._steps, self._own, self._since = 0, 0.0, time.perf_counter()
        return self.tree

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the global weights, the outer momentum, the counters, and what this rank has not sent
        yet."""
        if self.ctx.world_size == 1:  # no round ends, and all steps count
            self._outer.weights[...] = self._view.read(self.tree)
        return {
            **self._outer.state_dict(),
            "number": self.number,
            "samples": self.samples,
            "compressor": self._compressor.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from what `state_dict` returned, with the global weights in the tree. A collective: what rank 0 has
        loaded counts at every rank. The others may pass None; they then have nothing that is still to be sent.

        Raises `InvalidArgumentError` for anything else; nothing has changed then.
        """
        if state is not None:
            if not isinstance(state, dict) or not {"number", "samples", "compressor"} <= set(state):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgumentError("state", type(state).__name__, "must be what state_dict() has returned")
            number, samples = (_counter(name, state[name]) for name in ("number", "samples"))
            self._outer.check(state)
            self._compressor.load_state_dict(state["compressor"])
            self._outer.load_state_dict(state)
            self.number, self.samples = int(number), samples
        else:
            self._compressor.forget()
        self._begin_at_root()

    # --- a round ------------------------------------------------------------------------------------------------------

    def _take(self, tree: Any) -> None:
        if tree is not None:
            self.tree = tree
        elif self._view.is_replaced:
            why = "must be passed to every step, because its arrays cannot be written: tree = local.step(tree)"
            raise InvalidArgumentError("tree", None, why)

    def _begin_round(self, planned: int, total: float) -> None:
        self._planned, self._steps, self._own = planned, 0, 0.0
        self._last_total = total
        """The samples of all ranks in the round before."""

    def _begin_at_root(self) -> None:
        """All ranks take the weights, the momentum and the counters of rank 0. What was decided before does not count
        any more: after an error, ranks may have decided differently."""
        if self.ctx.world_size > 1:
            counters = np.array([self.number, self.samples])
            for array in (self._outer.weights, self._outer.velocity, counters):
                self.ctx.broadcast(array)
            self.number, self.samples = int(counters[0]), float(counters[1])
        self.tree = self._view.write(self._outer.weights, self.tree)
        self.decision, self._begun = self._first_decision(), self.number
        self._begin_round(min(_FIRST, self.decision.every), 0.0)
        self._since = time.perf_counter()

    def _first_decision(self) -> Decision:
        return Decision(self._every or _FIRST, self._codec or "none", "nothing is measured yet")

    def _tell(self, difference: Array) -> Array:
        """Return what each rank has done: steps, samples, seconds of a step, the round, elements that are not finite,
        and whether it has something that was not sent. Raise `NonFiniteError` at every rank if there are such elements.
        """
        odd, has_unsent = count_nonfinite(difference), bool(self._compressor.names)
        row = np.array([self._steps, self._own, self._pace.seconds, self.number, odd, has_unsent], np.float64)
        rows = self.ctx.all_gather(row)
        found = {rank: int(row[4]) for rank, row in enumerate(rows) if row[4]}
        if found:
            raise NonFiniteError("the weights after this round", found)
        if len({row[3] for row in rows}) > 1:
            numbers = [int(row[3]) for row in rows]
            why = f"the ranks are in rounds {numbers}; after an error, load_state_dict() at all of them"
            raise InvalidArgumentError("LocalSteps", f"round {self.number}", why)
        return rows

    def _reduce(self, difference: Array, own: float, *, has_unsent: bool) -> None:
        """Move the global weights by the mean difference, to which this rank's counts `own`, and write them into the
        tree. `has_unsent` says whether any rank has something that was not sent."""
        codec = self.decision.codec
        self._compressor.strategy = CompressionStrategy.parse(codec)
        if codec == "none" and not has_unsent:
            difference *= difference.dtype.type(own)
            self.ctx.all_reduce(difference)
        else:
            tensors = [(_NAME, difference.shape)]
            self.ctx.all_reduce_compressed(difference, ReduceOp.premul_sum(own), self._compressor, tensors)
        is_mean = self.decision.every == 1  # of single steps, which have their momentum in the optimizer
        self._outer.step(
            difference, OuterSettings(1.0, 0.0) if is_mean else self._settings(is_sparse=codec == "sparse")
        )
        self.tree = self._view.write(self._outer.weights, self.tree)

    def _settings(self, *, is_sparse: bool) -> OuterSettings:
        usual = OuterSettings.usual(self.ctx.world_size, self._rounds, is_sparse=is_sparse)
        rate, momentum = self._outer_asked
        usual = usual if rate is None else replace(usual, rate=rate)
        return usual if momentum is None else replace(usual, momentum=momentum)

    def _decide(self, rows: Array) -> None:
        """Decide how the next rounds go. Every rank has the same numbers, and decides the same."""
        is_fixed = self._every is not None and self._codec is not None
        rounds = self.number - self._begun
        if is_fixed or (rounds - 1) % DECIDE_AFTER:
            return
        known = [float(row[2]) for row in rows if row[2] > 0]
        table = auto.measure_again(self.ctx.group)
        shapes = [(self._view.size,)]
        times = {name: table.predict(CompressionStrategy.parse(name), shapes) for name in ("none", *CODECS)}
        costs = Costs(min(known, default=0.0), times)
        last = None if rounds == 1 else self.decision
        self.decision = choice.decide(costs, last, every=self._every, codec=self._codec)
        if last is None or (last.every, last.codec) != (self.decision.every, self.decision.codec):
            text = f"Local steps: {self.decision}: {self.decision.why}"
            logger.info("%s", text)
            own_trace().event("local_steps", text)


def _whole(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= most:
        raise InvalidArgumentError(name, value, f"must be a whole number from 1 to {most}")
    return int(value)


def _counter(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < float("inf"):
        raise InvalidArgumentError(name, value, "must be what state_dict() has returned")
    return float(value)


def _codec(name: object) -> str | None:
    """Return the name of a codec; None if it is to be chosen."""
    if name == "auto":
        return None
    if name not in ("none", *CODECS):
        raise InvalidArgumentError("codec", name, f"must be one of: auto, none, {', '.join(CODECS)}")
    return cast("str", name)
