"""The order of a stream: which sample is at which place of a pass, for data sets that can only be read from the start.

A stream that gives the same samples whenever it is read has one order at all machines. So each sample is applied
exactly once per pass, although every machine reads for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ringfort.errors import InvalidArgumentError
from ringfort.training.elastic.sample_order import random_key


def read_pass(
    dataset: Any, number: int, begin: int, *, seed: int, seed_generators: Callable[[int], None]
) -> Iterator[Any]:
    """Yield the samples of pass `number` from place `begin` on, without end: where the stream ends it is read again
    from its start. Stop only if the stream has no samples.

    Each reading begins with `set_epoch(number)`, if the data set has it, and with generators that are seeded by the
    pass, so that a stream that shuffles has the same order at every machine. Samples before `begin` are skipped by
    `dataset.skip(begin)`, if there is such a method, or else read and dropped.
    """
    place, lap = 0, 0
    stream = dataset
    if begin and hasattr(dataset, "skip"):
        _set_epoch(dataset, number)
        stream, place = _skipped(dataset, begin), begin
    while True:
        _set_epoch(stream, number)  # of what skip() returned, too: with Hugging Face that is another data set
        seed_generators(random_key(seed, number, lap))
        is_empty = True
        for sample in stream:
            is_empty = False
            if place >= begin:
                yield sample
            place += 1
        if not is_empty:
            lap += 1
        elif stream is dataset:
            return
        else:  # it has fewer samples than were skipped; only reading tells how many
            place = 0
        stream = dataset


def _set_epoch(stream: Any, number: int) -> None:
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(number)


def _skipped(dataset: Any, begin: int) -> Any:
    stream = dataset.skip(begin)
    if not hasattr(stream, "__iter__"):
        why = f"its skip({begin}) must return the stream without its first {begin} samples, and returned {stream!r}"
        raise InvalidArgumentError("dataset", type(dataset).__name__, why)
    return stream


class SampleWindow:
    """The samples of a pass that were read and may still be wanted: from the start of the current step on."""

    def __init__(self, begin: int) -> None:
        """Expect the sample at place `begin` next."""
        self.begin = begin
        self._samples: list[Any] = []

    @property
    def end(self) -> int:
        """The place that is read next."""
        return self.begin + len(self._samples)

    def add(self, samples: list[Any], wanted_from: int) -> None:
        """Add what was read. Drop what lies before place `wanted_from`."""
        self._samples += samples
        gone = min(max(0, wanted_from - self.begin), len(self._samples))
        del self._samples[:gone]
        self.begin += gone

    def take(self, begin: int, end: int) -> list[Any]:
        """Return the samples of a micro-batch. They stay: another machine's death may void what was made of them."""
        return self._samples[begin - self.begin : end - self.begin]
