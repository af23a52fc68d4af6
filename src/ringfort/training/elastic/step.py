"""`Step`: one step of a run, as the program sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringfort.errors import InvalidArgumentError
from ringfort.training.elastic.protocol import Compute, Mark, Result
from ringfort.training.elastic.sample_order import Array


class Turn(NamedTuple):
    """A micro-batch that this member computes."""

    compute: Compute
    mark: Mark
    """The mark before the step."""


class Done(NamedTuple):
    """A step that the program is to apply."""

    result: Result
    weight: float
    """The weight of its samples."""
    loss: float
    """The weighted sum of their losses."""
    is_finite: bool = True
    is_overtaken: bool = False
    """There is no result: the run has finished while this member was away, or it leaves. The gradients are zeros, and
    what the program does with them is undone."""
    samples: int = 0
    """The number of its samples."""

    @property
    def is_empty(self) -> bool:
        """Whether no sample of the step has a weight. All members have the same sum of weights, so all find the
        same."""
        return not self.weight and not self.is_overtaken


class Source(Protocol):
    """What a step is made of: a `Participant`."""

    def advance(self) -> Turn | Done | None:
        """Return what the program has to do next; None after the last step."""
        ...

    def samples_of(self, turn: Turn) -> Array:
        """Return the samples of a micro-batch, and begin to measure the time that it takes."""
        ...

    def random_of(self, turn: Turn) -> np.random.Generator:
        """Return a new random generator for a micro-batch: the same numbers whoever computes it."""
        ...

    def add(self, turn: Turn, gradients: Any, count: float | None, loss: float) -> None:
        """Add the gradients of a micro-batch to the local sum. Its weight is `count`, or the number of its samples."""
        ...

    def mean_of(self, done: Done) -> Any:
        """Return the mean gradients of a sealed step."""
        ...

    def sealed(self, done: Done) -> None:
        """The program gets a step to apply."""
        ...

    def applied(self, done: Done) -> None:
        """The program has applied it."""
        ...


class Step:
    """One step of a run. Iterate over it to get the micro-batches that this machine computes; it ends when the step is
    sealed. Then apply `mean()`.

    A machine that was away while it computed continues with a later step: read `number` after the micro-batches.
    """

    def __init__(self, source: Source, first: Turn | Done) -> None:
        self._source = source
        self._next: Turn | Done | None = first
        """What `advance` has returned and nobody has done yet."""
        self._turn = first if isinstance(first, Turn) else None
        self._is_added = True
        self._is_inside = False
        """Whether the program is in `for part in step`."""
        self._random: np.random.Generator | None = None
        """That of the current micro-batch, once the program has asked for it."""
        self._done: Done | None = None
        self._is_over = False

    @property
    def number(self) -> int:
        """The number of this step, from 1."""
        if self._done is not None:
            return self._done.result.step
        if isinstance(self._next, Done):
            return self._next.result.step
        assert self._turn is not None
        return self._turn.compute.step

    @property
    def skipped(self) -> bool:
        """Whether the step has no mean, so that no machine applies it: its gradients have infinities or NaNs (with
        `nonfinite="skip"`), or all its micro-batches were added with `count=0`. The samples count as used. Known after
        the micro-batches."""
        done = self._result()
        return done.is_empty or not done.is_finite

    @property
    def loss(self) -> float:
        """The mean loss over all samples of the step, from `add(loss=)`; 0 if none has a weight. Known after the
        micro-batches."""
        done = self._result()
        return done.loss / done.weight if done.weight else 0.0

    @property
    def samples(self) -> int:
        """The number of samples of the step, on all machines together: for learning rates that depend on it. The last
        step of a pass has fewer than others. Known after the micro-batches."""
        return self._result().samples

    def __iter__(self) -> Iterator[Array]:
        """Yield the samples of each micro-batch, as indices. Call `add` for each before the next."""
        while self._done is None:
            self._check_open()
            if self._next is None:
                self._next = self._source.advance()
            if isinstance(self._next, Done):
                self._done, self._next = self._next, None
                self._source.sealed(self._done)
                return
            assert self._next is not None  # a run does not end inside a step
            self._turn, self._is_added = self._next, False
            self._is_inside = True
            try:
                yield self._source.samples_of(self._turn)
            finally:
                self._is_inside, self._random = False, None
            if not self._is_added:  # it stays the next one: without it the step could never be sealed
                raise self._misuse("call step.add(...) once for each micro-batch")

    def add(self, gradients: Any = None, *, count: float | None = None, loss: float = 0.0) -> None:
        """Add the gradients of the current micro-batch: their means over its samples, in dicts and lists of arrays.
        With local steps, say that the program has made its step with this micro-batch, without gradients.
        `count` is their weight, by default the number of samples; `loss` is their mean loss. With `count=0`, as for
        a micro-batch of padding alone, the values of both are ignored: a mean over nothing is NaN.

        Raises `InvalidArgumentError` for a `count` or `loss` that is no number, and `GradientLayoutError` if the
        gradients differ from those before in names, order, shapes or element types. Nothing was added then.
        """
        if self._turn is None or self._is_added:
            raise self._misuse("step.add(...) belongs into `for part in step`, once")
        self._source.add(self._turn, gradients, count, loss)
        self._is_added, self._next = True, None

    @property
    def random(self) -> np.random.Generator:
        """The random generator of the current micro-batch, for dropout or augmentation: its numbers depend on the
        run's seed, the step and the micro-batch alone, so it does not matter which machine computes that, and how
        often.

        Raises `InvalidArgumentError` outside `for part in step`.
        """
        if not self._is_inside or self._turn is None:
            raise self._misuse("step.random belongs to a micro-batch; use it inside `for part in step`")
        if self._random is None:
            self._random = self._source.random_of(self._turn)
        return self._random

    def mean(self) -> Any:
        """Return the mean of the gradients over all samples of the step: the same bits at every member.

        Raises `InvalidArgumentError` for a step that is `skipped`, is not iterated over yet, or is over.
        """
        self._check_open()
        done = self._result()
        if not done.is_finite:
            raise self._misuse("its gradients are not finite; look at step.skipped before mean()")
        if done.is_empty:
            raise self._misuse("all its micro-batches were added with count=0; look at step.skipped before mean()")
        return self._source.mean_of(done)

    def end(self) -> None:
        """Say that the program has applied the step: the memory of its result is used again."""
        done = self._result()
        self._is_over = True
        self._source.applied(done)

    def _result(self) -> Done:
        for _ in self:
            raise self._misuse("iterate over every micro-batch of each step")
        assert self._done is not None
        return self._done

    def _check_open(self) -> None:
        if self._is_over:
            raise self._misuse("it is over; use it before the next step")

    def _misuse(self, why: str) -> InvalidArgumentError:
        return InvalidArgumentError("step", self.number, why)
