"""Which samples a step covers, how they are cut into micro-batches, and which member computes which. Pure.

Integers only: a deal must come out the same at every member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct

from ringfort.errors import InvalidArgumentError
from ringfort.training.elastic.sample_order import Array, random_key, sample_order

MAX_PARTS: Final = 4096
"""Micro-batches per step. Each has a bit in the token of every member."""
_PER_MEMBER: Final = "batch_per_member"
_MAX_SAMPLES: Final = 2**62
"""Samples of a data set: their places are mixed in 64 bits."""


@dataclass(frozen=True)
class Data:
    """The data set of a run and how it is cut. Part of what all members must agree on."""

    samples: int
    batch: int
    """The samples of a step; with `is_per_member` of each member of the epoch in which the step is opened; with
    `is_planned` of each optimizer step of a round."""
    microbatch: int
    seed: int = 0
    is_per_member: bool = False
    sync: str = ""
    """How members make a step together, if not by averaging the gradients of its micro-batches."""
    is_planned: bool = False
    """The state of the run says how many optimizer steps the next round has."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgumentError` for a number that no run can have."""
        batch = _PER_MEMBER if self.is_per_member else "batch"
        for name, value in (("samples", self.samples), (batch, self.batch), ("microbatch", self.microbatch)):
            if type(value) is not int or value < 1:
                raise InvalidArgumentError(name, value, "must be a whole number of at least 1")
        if self.samples > _MAX_SAMPLES:
            raise InvalidArgumentError("samples", self.samples, f"must be at most {_MAX_SAMPLES}")
        if self.parts(self.span(0)) > MAX_PARTS:
            why = f"a step of {self.batch} samples would have more than {MAX_PARTS} micro-batches; make them larger"
            raise InvalidArgumentError("microbatch", self.microbatch, why)

    @property
    def settings(self) -> dict[str, int | str]:
        """What two runs of one name must have in common. It is part of the run's name in the cluster and of its
        checkpoints, so it does not change."""
        batch = _PER_MEMBER if self.is_per_member else "batch"
        usual: dict[str, int | str] = {
            "samples": self.samples,
            batch: self.batch,
            "microbatch": self.microbatch,
            "seed": self.seed,
        }
        if self.sync:
            usual["sync"] = self.sync
        return usual

    def __str__(self) -> str:
        return f"Data({', '.join(f'{name}={value}' for name, value in self.settings.items())})"

    @property
    def _varies(self) -> bool:
        return self.is_per_member or self.is_planned

    def span(self, cursor: int, times: int = 1, *, opened: int = 0) -> Span:
        """Return what the step at `cursor` covers that so many members open, or that has so many optimizer steps; or
        that was `opened` before with so many samples. The last step of a pass is short: no step crosses two passes."""
        number, begin = divmod(cursor, self.samples)
        grown = min(self.batch * times, MAX_PARTS * self.microbatch) if self._varies else self.batch
        return Span(number, begin, min(begin + (opened or grown), self.samples))

    @property
    def most_parts(self) -> int:
        """The largest number of micro-batches that a step can have."""
        return self.parts(self.span(0, MAX_PARTS))

    def parts(self, span: Span) -> int:
        """Return the number of micro-batches of a step."""
        return -(-(span.end - span.begin) // self.microbatch)

    def part(self, span: Span, index: int) -> Array:
        """Return the samples of one micro-batch, as indices into the data set."""
        begin = span.begin + index * self.microbatch
        return sample_order(self.seed, span.number, self.samples, begin, min(begin + self.microbatch, span.end))

    def steps_to(self, cursor: int) -> int:
        """Return the number of steps of `batch` samples up to a cursor. Planned rounds are fewer."""
        passes, rest = divmod(cursor, self.samples)
        return passes * -(-self.samples // self.batch) + -(-rest // self.batch)

    def size(self, span: Span, index: int) -> int:
        """Return the number of samples of one micro-batch."""
        return min(self.microbatch, span.end - span.begin - index * self.microbatch)

    def random(self, step: int, index: int) -> np.random.Generator:
        """Return the random generator of one micro-batch: the same whoever computes it, and however often."""
        return np.random.default_rng(random_key(self.seed, step, index))


class Span(Struct, frozen=True):
    """The places `begin` to `end` in the order of pass `number`, which one step covers."""

    number: int
    begin: int
    end: int

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.end - self.begin

    @property
    def unit(self) -> int:
        """The number of samples whose weight is 1: the largest power of two that is not more than `samples`. So scaling
        rounds nothing, and where `samples` is a power of two the sum of all gradients is their mean already."""
        return 1 << (self.samples.bit_length() - 1)


class RunEnd(NamedTuple):
    """Where a run ends: with the first step that has this number or a later one, and with which the run has used this
    many samples, over all passes."""

    step: int = 0
    cursor: int = 0

    def is_reached(self, step: int, cursor: int) -> bool:
        """Return whether a run has ended whose last sealed step and cursor these are."""
        return step >= self.step and cursor >= self.cursor


def deal(missing: Sequence[int], speeds: Sequence[int]) -> list[tuple[int, ...]]:
    """Return which of the `missing` micro-batches each member computes, so that the last one is done as early as
    possible: about in proportion to `speeds`.

    A speed is a positive whole number, such as samples per second; 0 if unknown, which counts as the mean of the
    others. A member that was dealt nothing gets an empty turn.
    """
    known = [speed for speed in speeds if speed > 0]
    usual = max(1, sum(known) // len(known)) if known else 1
    paces = [speed if speed > 0 else usual for speed in speeds]
    # Each micro-batch goes to the member that would be done with it first. Whole shares always come out of that; they
    # are handed out at once, and less than one micro-batch per member is left.
    counts = [len(missing) * pace // sum(paces) for pace in paces]
    for _ in range(len(missing) - sum(counts)):
        first = 0
        for member in range(1, len(paces)):
            if (counts[member] + 1) * paces[first] < (counts[first] + 1) * paces[member]:
                first = member
        counts[first] += 1
    ends = list(accumulate(counts))
    return [tuple(missing[end - count : end]) for count, end in zip(counts, ends, strict=True)]
