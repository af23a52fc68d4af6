"""Which sample of a stream is at which place of a pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ringfort.errors import InvalidArgumentError
from ringfort.torch.training.stream_order import SampleWindow, read_pass


class Stream:
    """Counts to `length`, and how often it was begun."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        yield from range(self.length)


class Skipping(Stream):
    """Like a streamed data set of Hugging Face: `skip` and `set_epoch`, and each skip gives another data set."""

    def __init__(self, length: int, first: int = 0) -> None:
        super().__init__(length)
        self.first = first
        self.epoch = 0
        self.read: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def skip(self, count: int) -> Skipping:
        other = Skipping(self.length, self.first + count)
        other.read = self.read
        return other

    def __iter__(self) -> Iterator[Any]:
        for place in range(self.first, self.length):
            self.read.append(place)
            yield self.epoch, place


class Shuffled(Stream):
    """In an order by the global generator, all of which is drawn at the start."""

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(self.length), self.length)


def read(dataset: Any, begin: int, count: int, number: int = 0, seed: int = 0) -> list[Any]:
    return list(islice(read_pass(dataset, number, begin, seed=seed, seed_generators=random.seed), count))


@given(length=st.integers(1, 9), begin=st.integers(0, 30), count=st.integers(0, 30), can_skip=st.booleans())
def test_a_stream_is_read_again_where_it_ends_and_from_any_place(
    length: int, begin: int, count: int, can_skip: bool
) -> None:
    places = [place % length for place in range(begin, begin + count)]
    if can_skip:
        assert read(Skipping(length), begin, count, number=3) == [(3, place) for place in places]
    else:
        assert read(Stream(length), begin, count) == places


def test_skipped_samples_are_not_read_if_the_stream_can_skip() -> None:
    stream = Skipping(1000)
    assert read(stream, 900, 2) == [(0, 900), (0, 901)]
    assert stream.read == [900, 901]


def test_a_pass_has_one_order_wherever_it_is_entered_and_each_pass_another() -> None:
    whole = read(Shuffled(20), 0, 40, number=1, seed=5)
    assert sorted(whole[:20]) == sorted(whole[20:]) == list(range(20))
    assert whole[:20] != whole[20:]
    random.random()
    for begin in (1, 19, 20, 33):
        assert read(Shuffled(20), begin, 40 - begin, number=1, seed=5) == whole[begin:]
    assert read(Shuffled(20), 0, 40, number=2, seed=5) != whole
    assert read(Shuffled(20), 0, 40, number=1, seed=6) != whole


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("empty", [Stream, Skipping])
def test_an_empty_stream_ends(empty: type[Stream], begin: int) -> None:
    assert read(empty(0), begin, 1) == []


def test_a_stream_that_can_be_read_once_only_ends_there() -> None:
    assert read(iter(range(3)), 0, 9) == [0, 1, 2]


def test_a_skip_that_returns_no_stream_is_an_error() -> None:
    class InPlace(Stream):
        def skip(self, count: int) -> None: ...

    with pytest.raises(InvalidArgumentError, match=r"dataset='InPlace': its skip\(4\) must return the stream"):
        read(InPlace(9), 4, 1)


def test_a_window_forgets_what_lies_before_the_step() -> None:
    window = SampleWindow(10)
    window.add([10, 11, 12, 13], wanted_from=12)
    assert (window.begin, window.end) == (12, 14)
    window.add([14], wanted_from=12)
    assert window.take(13, 15) == [13, 14]
    window.add([15], wanted_from=100)
    assert (window.begin, window.end) == (16, 16)
