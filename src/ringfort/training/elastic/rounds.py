"""Rounds of local steps in an elastic run: what members have in common, how their differences are added up, and how
often.

To the protocol nothing is new: a step of the run is a round. What a member adds to its sum is not the gradients of its
micro-batches, but what they have made of its weights: the global weights less its own, times the weight of its samples.
So a round is sealed, repeated after a fault, and replayed like any other step. `array_rounds.py` has that for arrays,
ringfort/torch/training/local_rounds.py for torch.

With `sync="auto"` the next rounds are planned in the reduction of each round: members measure, decide alike, and the
plan is part of the result. So it is sealed with the round, and whoever replays the round has the same plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ringfort.backends.group import Group
from ringfort.collectives.ops import ReduceOp
from ringfort.compression import auto
from ringfort.compression.compressor import GradientCompressor
from ringfort.compression.strategy import CompressionStrategy
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.telemetry.trace import own_trace
from ringfort.training.elastic.sample_order import Array
from ringfort.training.local_steps import choice
from ringfort.training.local_steps.choice import CODECS, DECIDE_AFTER, FEWEST, Costs, Decision
from ringfort.training.local_steps.outer import OuterSettings
from ringfort.training.local_steps.pace import steps_of

Sync = Literal["every_step", "local", "auto"]
MOST: Final = 100_000
_USUAL_EVERY: Final = 16
_CODECS: Final = ("none", *CODECS)
WORDS: Final = 3
"""Numbers of a plan in a result."""
_NAME: Final = "difference"
_SETTLED: Final = 2
"""The reduction of an epoch in which it is measured first: in the first one, members that have lost or found one wait
for each other."""
_OFF: Final = 2.0
"""If a reduction takes this many times as long as was expected, or as short, the network has changed."""
_NOISE: Final = 0.02
"""Seconds by which a reduction may differ in any case: machines do other things too."""
_FAST: Final = (
    '. Each machine makes its own optimizer step, and the weights are averaged: sync="every_step" averages gradients'
)
"""What is said of rounds of one step: with Adam they are no synchronous SGD."""

logger = logging.getLogger("ringfort.elastic")


class RoundPlan(NamedTuple):
    """How rounds go that are opened now. Part of the state of the run."""

    steps: int
    """Optimizer steps in a round, of all machines together."""
    codec: str
    every: int = 0
    """Those of the fastest machine; 0 if nobody has decided that."""

    @property
    def words(self) -> tuple[float, ...]:
        """The plan as numbers that every float32 has."""
        return self.steps, _CODECS.index(self.codec), self.every

    @classmethod
    def of(cls, words: Sequence[float]) -> RoundPlan:
        """Return the plan whose `words` these are."""
        steps, codec, every = (int(word) for word in words)
        return cls(steps, _CODECS[codec], every)


@dataclass(frozen=True)
class RoundSettings:
    """What all members of a run with local steps have in common."""

    first: RoundPlan
    """That of the first rounds; with a fixed number of steps that of all."""
    is_planned: bool = False
    """Whether the members measure and decide how rounds go."""
    codec: str | None = None
    """The codec that the program has asked for."""
    outer: OuterSettings = field(default_factory=OuterSettings)
    """Of the outer steps of rounds that have momentum."""

    @classmethod
    def of(cls, sync: Sync, every: Any, codec: Any, rate: Any, momentum: Any) -> RoundSettings:
        """Return the settings from what a program has passed. Raise `InvalidArgumentError` for what is invalid."""
        if every is not None and sync == "auto":
            raise InvalidArgumentError("every", every, 'is what sync="auto" decides; pass sync="local"')
        every = _USUAL_EVERY if every is None else every
        if isinstance(every, bool) or not isinstance(every, int) or not 1 <= every <= MOST:
            raise InvalidArgumentError("every", every, f"must be a whole number from 1 to {MOST}")
        if codec is not None and codec not in _CODECS:
            raise InvalidArgumentError("codec", codec, f"must be one of: {', '.join(_CODECS)}")
        is_planned = sync == "auto"
        first = RoundPlan(FEWEST if is_planned else every, codec or "int8")
        asked = {name: value for name, value in (("rate", rate), ("momentum", momentum)) if value is not None}
        return cls(first, is_planned, codec, OuterSettings(**asked))

    @property
    def times(self) -> int:
        """Optimizer steps in a round, if that is the same for all rounds; 1 if it is planned."""
        return 1 if self.is_planned else self.first.steps

    def __str__(self) -> str:
        if not self.is_planned:
            return f"local, every {self.first.steps} steps, codec {self.first.codec}, outer {self.outer}"
        return f"auto, codec {self.codec or 'auto'}, outer {self.outer}"


def round_settings(sync: Any, every: Any, codec: Any, rate: Any, momentum: Any) -> RoundSettings | None:
    """Return the settings of local steps from what a program has passed; None for exact steps. Raise
    `InvalidArgumentError` for what is invalid."""
    if sync not in ("every_step", "local", "auto"):
        raise InvalidArgumentError("sync", sync, "must be every_step, local or auto")
    if sync != "every_step":
        return RoundSettings.of(sync, every, codec, rate, momentum)
    for name, value in {"every": every, "codec": codec, "outer_rate": rate, "outer_momentum": momentum}.items():
        if value is not None:
            raise InvalidArgumentError(name, value, 'is for sync="local" and sync="auto"')
    return None


class RoundReduction:
    """Adds up what the members have changed in a round, and plans the next ones."""

    def __init__(self, settings: RoundSettings) -> None:
        self.settings = settings
        self.plan = settings.first
        """How rounds go that are opened now: as the last sealed round says, or the state that was loaded."""
        self.step_seconds: Callable[[], float] = lambda: 0.0
        """Returns what an optimizer step takes here; 0 if unknown."""
        self._compressor = GradientCompressor(settings.first.codec)
        self.unsent = self._compressor.state_dict()
        """What was not sent before this round."""
        self._reduced: Array | None = None
        """The latest sum that this member had a part in."""
        self._group: Group | None = None
        self._count = 0
        """Reductions of the present group: the same at all its members."""
        self._measured_at = 0
        """Which of them has measured last."""
        self._table: auto.Table | None = None
        self._took = (0.0, 0.0)
        """Seconds that the last reduction took, and that were expected."""

    def add_up(self, context: DistributedContext, words: Array, exact: Sequence[Array], difference: Array) -> None:
        """Replace `exact` and `difference` by the sums of all members'. `words` is the place in `exact` for the plan of
        the next rounds. All may lie in one array, whose base is what `sealed` is told."""
        self._compressor.load_state_dict(self.unsent)  # an earlier try may have changed it
        plan = self.plan
        if self.settings.is_planned and context.world_size > 1:
            plan = self._planned(context, difference.size)
        words[...] += np.array(plan.words if context.rank == 0 else (0,) * WORDS, words.dtype)
        begun = time.perf_counter()
        for part in exact:
            if part.size:
                context.all_reduce(part)
        codec = self.plan.codec
        self._compressor.strategy = CompressionStrategy.parse(codec)
        if codec == "none" and not self.settings.is_planned:
            context.all_reduce(difference)
        else:  # with a codec that may change, somebody may have something that was not sent
            context.all_reduce_compressed(difference, ReduceOp.SUM, self._compressor, [(_NAME, difference.shape)])
        self._took = time.perf_counter() - begun, self._expected(codec, difference.size)

    def reduced(self, total: Array) -> None:
        """`total` is the result of a reduction that this member had a part in."""
        self._reduced = total

    def sealed(self, total: Array, words: Sequence[float]) -> RoundPlan:
        """A round counts, and so does what its codec has not sent: unless others have reduced it without this member,
        whose own try has failed or was of an earlier round. Return the plan that it was reduced with; from now on that
        in its `words` holds."""
        if total is self._reduced:
            self.unsent = self._compressor.state_dict()
        self._reduced = None  # whose memory is used again
        before, self.plan = self.plan, RoundPlan.of(words)
        return before

    # --- planning -----------------------------------------------------------------------------------------------------

    def _planned(self, context: DistributedContext, size: int) -> RoundPlan:
        """Return the plan for the next rounds: the same at all members. A collective, in which all wait for the last
        one: so what follows measures the reduction alone."""
        rows = context.all_gather(np.array([self.step_seconds(), *self._took]))
        if context.group is not self._group:
            self._group, self._count, self._measured_at, self._table = context.group, 0, 0, None
        self._count += 1
        is_due = self._count == _SETTLED or self._count - self._measured_at >= DECIDE_AFTER
        if self._count < _SETTLED or not (is_due or (self._measured_at and _is_off(rows))):
            return self.plan
        self._table, self._measured_at = auto.measure_again(context.group), self._count
        seconds = [float(row[0]) for row in rows]
        reductions = {codec: self._expected(codec, size) for codec in _CODECS}
        costs = Costs(min((one for one in seconds if one > 0), default=0.0), reductions)
        last = Decision(self.plan.every, self.plan.codec) if self.plan.every else None
        decision = choice.decide(costs, last, codec=self.settings.codec)
        if last is None or (last.every, last.codec) != (decision.every, decision.codec):
            text = f"Local steps: {decision}: {decision.why}{_FAST if decision.every == 1 else ''}"
            logger.info("%s", text)
            own_trace().event("local_steps", text)
        return RoundPlan(min(sum(steps_of(decision.every, seconds)), MOST), decision.codec, decision.every)

    def _expected(self, codec: str, size: int) -> float:
        """Return the seconds that a reduction of so many elements takes, as measured; 0 if nothing was."""
        return 0.0 if self._table is None else self._table.predict(CompressionStrategy.parse(codec), [(size,)])


def _is_off(rows: Array) -> bool:
    """Return whether the last reduction took another time than was expected, at the member where it took longest."""
    took, expected = float(rows[:, 1].max()), float(rows[:, 2].max())
    return took > _OFF * expected + _NOISE or expected > _OFF * took + _NOISE
