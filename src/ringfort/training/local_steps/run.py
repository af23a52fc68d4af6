"""`LocalSteps`: each rank trains by itself for a round of local steps; then the ranks average what has become of the
weights. That takes hundreds of times fewer bytes than averaging gradients in every step.

    local = ringfort.LocalSteps(ctx, weights)
    while local.samples < 1_000_000:
        train_one_batch(weights)           # in place, at this rank's own speed
        local.step(samples=batch)          # at the end of a round: weights are the same bits at every rank

The ranks go through a round without any communication. At its end they tell each other in one small message what they
have done, add up their differences, and each moves the global weights by the mean (`OuterOptimizer`).

With `fragments`, parts of the weights take turns, and the ranks go on training while a part is reduced (Streaming
DiLoCo, arXiv:2501.18512). A round has a turn for each part. At the end of a turn, a rank takes over the part that was
begun a turn ago, and begins the next one. All ranks begin the same parts in the same order, so the global weights have
the same bits everywhere, whenever a rank takes them over.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar, cast

import numpy as np

from ringfort.backends.sub import SubBackend
from ringfort.collectives.algorithms import split
from ringfort.collectives.all_gather import all_gather
from ringfort.collectives.all_reduce import all_reduce
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.ops import ReduceOp
from ringfort.collectives.plan import Operation
from ringfort.collectives.work import Work
from ringfort.compression import auto, collective as compressed
from ringfort.compression.compressor import GradientCompressor
from ringfort.compression.floats import count_nonfinite
from ringfort.compression.strategy import CompressionStrategy
from ringfort.errors import DistributedError, InvalidArgumentError, NonFiniteError
from ringfort.telemetry.trace import own_trace
from ringfort.training.gradients import compare_listings
from ringfort.training.local_steps import choice
from ringfort.training.local_steps.choice import CODECS, DECIDE_AFTER, HIDDEN_SHARE, SHARE, Costs, Decision
from ringfort.training.local_steps.outer import OuterOptimizer, OuterSettings
from ringfort.training.local_steps.pace import Pace, Weighting, check_weighting, shares, steps_of
from ringfort.training.local_steps.weights_view import WeightsView
from ringfort.transport.reducer import Array

if TYPE_CHECKING:
    from ringfort.backends.group import Group
    from ringfort.context import DistributedContext

Codec = Literal["auto", "none", "int8", "int4", "sparse"]
Tree = TypeVar("Tree")
_FIRST: Final = 5
"""Local steps of the first round, after which the speeds of all ranks are known."""
_MOST: Final = 1_000_000
_MOST_FRAGMENTS: Final = 64
_KEPT: Final = 0.5
"""What a rank keeps of its own weights when it takes over a part that was reduced while it trained: it has made steps
since (arXiv:2501.18512)."""
_NAME: Final = "difference"

logger = logging.getLogger("ringfort.local_steps")


class _Told(NamedTuple):
    """What came of the reduction of a part: the same at every rank."""

    samples: float
    """What all ranks have done since the reduction before."""
    seconds: list[float]
    """Of a step of each rank; 0 if unknown."""
    mean: Array | None
    """The mean difference. None if no rank has made a step since the last reduction of this part."""
    settings: OuterSettings
    decision: Decision | None
    """How the next rounds go, if that was decided."""


@dataclass
class _Part:
    """A part of the weights."""

    span: slice
    name: str
    steps: int = 0
    """Of this rank, since the last reduction of the part was begun."""
    samples: float = 0.0


class _Pending(NamedTuple):
    """A part that is being reduced."""

    place: int
    work: Work
    steps: int
    """Of this rank, which are not in `LocalSteps.samples` yet."""


class LocalSteps:
    """Averages the weights of all ranks at the end of each round of local steps."""

    _view_of: Callable[..., ArrayView] = staticmethod(as_view)
    """How the arrays of the tree are read and written."""

    def __init__(
        self,
        ctx: DistributedContext,
        tree: Any,
        *,
        every: int | Literal["auto"] = "auto",
        codec: Codec = "auto",
        weighting: Weighting = "samples",
        pace: Literal["time", "steps"] = "time",
        outer_rate: float = 1.0,
        outer_momentum: float = 0.0,
        fragments: int = 1,
    ) -> None:
        """Begin with the weights of rank 0, which are written into every rank's tree.

        Args:
            ctx: the group.
            tree: the weights: nested dicts, lists and tuples of float arrays, as for `average_gradients`. Arrays that
                cannot be written (MLX, JAX) are replaced: read `local.tree`, and pass the new tree to `step`.
            every: local steps of the fastest rank in a round. `"auto"` measures steps, links and codecs, decides, and
                decides again every 20 rounds. `local.decision` and the logger `ringfort.local_steps` say why.
            codec: how differences are sent: `"none"` (exact), `"int8"`, `"int4"` or `"sparse"` (141 times fewer bytes
                than float32).
            weighting: how the ranks' differences count: by `"samples"`, `"uniform"`, or `"normalized"` by steps.
            pace: with `"time"` a slower rank makes fewer steps, so that all arrive together. With `"steps"` all make
                the same number.
            outer_rate: how far the global weights go towards the mean of the ranks' weights; 1 is all the way.
            outer_momentum: Nesterov's, for the global weights. DiLoCo has a rate of 0.6 and a momentum of 0.9. Rounds
                of one step and those with `sparse` have none.
            fragments: with more than 1, so many parts of the weights take turns in a round, and each is reduced while
                the ranks train on: nobody waits for the wire. A rank then has its own weights between rounds too; at
                the end of a training call `end_round()`, which gives all ranks the same ones.

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
        self._settings = OuterSettings(outer_rate, outer_momentum)
        self.remove_hook: Callable[[], object] = lambda: None
        """Stops the counting of an optimizer's steps, if an optimizer counts them."""
        self._view = WeightsView(tree, self._view_of)
        number = _whole("fragments", fragments, min(_MOST_FRAGMENTS, self._view.size))
        spans = [slice(*span) for span in split(self._view.size, number)]
        names = [_NAME] if number == 1 else [f"{_NAME} {place}" for place in range(number)]
        self._parts = [_Part(span, name) for span, name in zip(spans, names, strict=True)]
        self._group = ctx.group
        if ctx.world_size > 1:
            asked = f"every={every}, codec={codec}, weighting={weighting}, pace={pace}"
            asked = f"{asked}, fragments={fragments}"
            compare_listings(ctx, (f"{asked}, outer {self._settings}", *self._view.listing))
        # What runs in the background must not get between the program's own collectives.
        self._side = ctx
        if ctx.world_size > 1 and number > 1:
            self._side = ctx.over(SubBackend(ctx.backend, range(ctx.world_size)))
        self._pending: deque[_Pending] = deque()
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
        self._new_steps += 1
        self._new_samples += float(samples)
        for part in self._parts:
            part.steps += 1
            part.samples += float(samples)
        own_trace().mark(self.ctx)
        if self.ctx.world_size == 1:
            self.samples += float(samples)
        elif self._turns > 1:
            if self._steps * self._turns >= self._planned * (self._turn + 1):
                self._end_turn()
        elif self._steps >= self._planned:
            self.end_round(self.tree)
        return self.tree

    def end_round(self, tree: Tree | None = None) -> Tree:
        """End the round now, with the steps that were made: afterwards all ranks have the same weights. A collective:
        every rank calls it in the same round (and with `fragments` after the same turn, as at the end of a loop over
        `samples`). If no rank has made a step since the last round, nothing changes. Return the tree.

        Raises what `step` raises.
        """
        self._take(tree)
        if self.ctx.world_size > 1:
            self._merge()
            for place in range(len(self._parts)):
                self._apply(place, self._side.issue(self._reduction(place), False), kept=0.0)
            self._adopt()
            self._begin_round()
        self._since = time.perf_counter()
        return self.tree

    @property
    def ended_round(self) -> bool:
        """Whether the last `step` has ended a round, so that the weights are the global ones (without `fragments`):
        alone they always are."""
        return self._steps == 0 or self.ctx.world_size == 1

    @property
    def samples_now(self) -> float:
        """`samples`, and an estimate of what all ranks have done since: for learning-rate schedules. It grows with
        every step of this rank, and is exact at the end of a round."""
        if self.ctx.world_size == 1:
            return self.samples
        made = self._new_steps + sum(one.steps for one in self._pending)
        share = min(1.0, made / self._planned)
        return self.samples + (sum(self._last_totals) * share or self._new_samples * self.ctx.world_size)

    @contextmanager
    def global_weights(self) -> Generator[Any]:
        """Have the global weights in the tree, for an evaluation or a checkpoint: those of the last round, without the
        local steps since. After the block the tree has its own weights again. Gives the tree."""
        begun = time.perf_counter()
        self._merge()
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
            self._merge()
            self.tree = self._view.write(self._outer.weights, self.tree)
            self._forget_steps()
        return self.tree

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the global weights, the outer momentum, the counters, and what this rank has not sent
        yet."""
        self._merge()
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
        while self._pending:
            with suppress(DistributedError):  # what came of it does not count any more
                self._pending.popleft().work.wait()
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

    def _begin_round(self) -> None:
        self._steps = self._turn = 0

    def _forget_steps(self) -> None:
        """Begin a round with the global weights."""
        self._begin_round()
        self._new_steps, self._new_samples, self._since = 0, 0.0, time.perf_counter()
        for part in self._parts:
            part.steps, part.samples = 0, 0.0

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
        self._planned = min(_FIRST, self.decision.every)
        self._turns = min(len(self._parts), self._planned)
        """Of a round. With one, all parts are reduced at its end, while the ranks wait."""
        self._news: _Told | None = None
        """What the last round has told of the next ones."""
        self._reductions = 0
        """Those that were taken over since."""
        self._last_totals: deque[float] = deque(maxlen=len(self._parts))
        """The samples of all ranks in the last turns."""
        self._forget_steps()

    def _first_decision(self) -> Decision:
        return Decision(self._every or _FIRST, self._codec or "none", "nothing is measured yet")

    def _end_turn(self) -> None:
        """Take over what is being reduced, and begin with the parts of this turn."""
        self._merge()
        self._adopt()
        if self._turns == 1:  # from now on, as was decided with what was just taken over
            self.end_round()
            return
        count = len(self._parts)
        for place in range(count * self._turn // self._turns, count * (self._turn + 1) // self._turns):
            operation, steps = self._reduction(place), self._new_steps
            self._new_steps, self._new_samples = 0, 0.0
            self._parts[place].steps, self._parts[place].samples = 0, 0.0
            self._pending.append(_Pending(place, self._side.issue(operation, True), steps))
        self._turn += 1
        if self._turn == self._turns:
            self._begin_round()
        self._since = time.perf_counter()

    def _merge(self) -> None:
        """Take over what is being reduced, if anything: wait for it."""
        while self._pending:
            pending = self._pending.popleft()
            self._apply(pending.place, pending.work.wait(), kept=_KEPT)

    def _reduction(self, place: int) -> Operation:
        """Return the operation that tells the others what this rank has done, and reduces a part of the weights. It
        touches nothing that local steps change."""
        part, group = self._parts[place], self._side.group
        difference = self._view.difference(self._outer.weights, self.tree, part.span)
        is_last = place == len(self._parts) - 1
        is_due = is_last and not self._is_fixed and not (self.number - self._begun) % DECIDE_AFTER
        decision, odd = self.decision, count_nonfinite(difference)
        has_unsent = part.name in self._compressor.names
        row = np.array(
            [part.steps, part.samples, self._pace.seconds, self._reductions, odd, has_unsent, self._new_samples],
            np.float64,
        )

        def run() -> _Told:
            rows = all_gather(group, row).run()
            _check(rows)
            seconds, settings = (
                [float(one) for one in rows[:, 2]],
                self._settings.of_round(decision.every, decision.codec),
            )
            if not rows[:, 0].any():  # outer momentum would move the weights alone
                return _Told(0.0, seconds, None, settings, None)
            share = shares(self._weighting, [int(one) for one in rows[:, 0]], [float(one) for one in rows[:, 1]])
            self._reduce(group, part.name, difference, share[group.rank], decision, has_unsent=bool(rows[:, 5].any()))
            decided = self._decide(group, seconds) if is_due else None
            return _Told(float(rows[:, 6].sum()), seconds, difference, settings, decided)

        return Operation("all_reduce", difference.nbytes, run)

    def _reduce(
        self, group: Group, name: str, difference: Array, own: float, decision: Decision, *, has_unsent: bool
    ) -> None:
        """Replace the difference of a part by the mean, to which this rank's counts `own`. `has_unsent` says whether
        any rank has something that was not sent."""
        if decision.codec == "none" and not has_unsent:
            difference *= difference.dtype.type(own)
            all_reduce(group, difference, ReduceOp.SUM).run()
            return
        self._compressor.strategy = CompressionStrategy.parse(decision.codec)
        tensors, op = [(name, difference.shape)], ReduceOp.premul_sum(own)
        metrics = self._side.metrics
        compressed.all_reduce(
            group, difference, op, compression=self._compressor, tensors=tensors, metrics=metrics
        ).run()

    def _apply(self, place: int, told: _Told, *, kept: float) -> None:
        """Move the global weights of a part by their mean difference, and write them into the tree. Of the tree's own
        `kept` stays."""
        part = self._parts[place]
        if told.mean is not None:
            self._outer.step(told.mean, told.settings, part.span)
            self.samples += told.samples
            self._last_totals.append(told.samples)
        if told.mean is not None or len(self._parts) > 1:
            self.tree = self._view.write(self._outer.weights, self.tree, part.span, kept=kept)
        self._reductions += 1
        if not kept:
            part.steps, part.samples = 0, 0.0
            self._new_steps, self._new_samples = 0, 0.0
        if place == len(self._parts) - 1 and told.mean is not None:
            self.number += 1
            self._news = told

    def _adopt(self) -> None:
        """Plan the next round by what the last one has told: only where a turn or a round ends, so that all ranks do
        it after the same number of steps, whoever has looked at the global weights before."""
        if self._news is not None:
            self.decision = self._news.decision or self.decision
            self._plan([0.0] * self.ctx.world_size if self._is_even else self._news.seconds)
            self._news = None

    def _plan(self, seconds: list[float]) -> None:
        """Plan rounds of ranks whose steps take so many seconds. A turn has at least one step of each rank: if a rank
        made several turns in one step, it would go past the end of a loop at which the others stop."""
        steps = steps_of(self.decision.every, seconds)
        self._planned, self._turns = steps[self.ctx.rank], min(len(self._parts), *steps)

    @property
    def _is_fixed(self) -> bool:
        return self._every is not None and self._codec is not None

    def _decide(self, group: Group, seconds: list[float]) -> Decision:
        """Return how the next rounds go. Every rank has the same numbers, and decides the same."""
        table, shapes = auto.measure_again(group), [(part.span.stop - part.span.start,) for part in self._parts]
        strategies = {name: CompressionStrategy.parse(name) for name in ("none", *CODECS)}
        times = {name: sum(table.predict(one, [shape]) for shape in shapes) for name, one in strategies.items()}
        costs = Costs(min((one for one in seconds if one > 0), default=0.0), times)
        last = None if self.number == self._begun else self.decision
        share = HIDDEN_SHARE if len(self._parts) > 1 else SHARE
        decision = choice.decide(costs, last, every=self._every, codec=self._codec, share=share)
        if last is None or (last.every, last.codec) != (decision.every, decision.codec):
            text = f"Local steps: {decision}: {decision.why}"
            logger.info("%s", text)
            own_trace().event("local_steps", text)
        return decision


def _check(rows: Array) -> None:
    """Raise `NonFiniteError` at every rank if one has weights that are not finite, and `InvalidArgumentError` if they
    are not at the same reduction."""
    found = {rank: int(row[4]) for rank, row in enumerate(rows) if row[4]}
    if found:
        raise NonFiniteError("the weights after this round", found)
    if len({row[3] for row in rows}) > 1:
        numbers = [int(row[3]) for row in rows]
        why = f"the ranks have made {numbers} reductions; after an error, load_state_dict() at all of them"
        raise InvalidArgumentError("LocalSteps", "out of step", why)


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
