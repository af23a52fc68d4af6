"""Which samples a step covers and who computes which: the same at every member, each micro-batch once."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ringfort.errors import InvalidArgumentError
from ringfort.training.elastic.dealing import MAX_PARTS, Data, Span, deal

SPEEDS = st.lists(st.one_of(st.integers(0, 5), st.integers(1, 10**9)), min_size=1, max_size=12)
DATA = st.builds(Data, st.integers(1, 300), st.integers(1, 100), st.integers(1, 20), st.integers(0, 5))


def steps_of_a_pass(data: Data, number: int = 0) -> list[Span]:
    spans, cursor = list[Span](), number * data.samples
    while cursor < (number + 1) * data.samples:
        spans.append(data.span(cursor))
        cursor += spans[-1].samples
    return spans


@given(DATA, st.integers(0, 3))
def test_the_steps_of_a_pass_cover_each_sample_once_and_none_crosses_into_the_next(data: Data, number: int) -> None:
    spans = steps_of_a_pass(data, number)
    assert {span.number for span in spans} == {number}
    assert all(0 < span.samples <= data.batch for span in spans)
    assert all(span.samples == min(data.batch, data.samples) for span in spans[:-1])
    samples = [int(one) for span in spans for part in range(data.parts(span)) for one in data.part(span, part)]
    assert sorted(samples) == list(range(data.samples))


@given(DATA)
def test_a_micro_batch_has_the_size_that_is_told_and_only_the_last_may_be_short(data: Data) -> None:
    for span in steps_of_a_pass(data):
        sizes = [data.size(span, part) for part in range(data.parts(span))]
        assert sizes == [data.part(span, part).size for part in range(data.parts(span))]
        assert all(size == data.microbatch for size in sizes[:-1])
        assert 0 < sizes[-1] <= data.microbatch


def test_the_last_step_of_a_pass_is_short() -> None:
    data = Data(samples=10, batch=4, microbatch=3)
    assert [data.span(cursor) for cursor in (0, 4, 8, 10)] == [
        Span(0, 0, 4),
        Span(0, 4, 8),
        Span(0, 8, 10),
        Span(1, 0, 4),
    ]
    assert (data.parts(data.span(0)), data.parts(data.span(8))) == (2, 1)
    assert data.size(data.span(8), 0) == 2


@given(st.lists(st.integers(1, 9), min_size=1), st.integers(1, 300), st.integers(1, 30), st.integers(1, 20))
def test_steps_that_grow_with_the_members_cover_each_sample_once(
    members: list[int], samples: int, batch: int, microbatch: int
) -> None:
    data, cursor, seen = Data(samples, batch, microbatch, is_per_member=True), 0, list[int]()
    for number in itertools.cycle(members):
        span = data.span(cursor, number)
        assert span.samples == min(batch * number, samples - cursor)
        assert data.span(cursor, opened=span.samples) == span  # as it stays, with however many members
        assert data.parts(span) <= data.most_parts
        seen += [int(one) for part in range(data.parts(span)) for one in data.part(span, part)]
        cursor += span.samples
        if cursor == samples:
            break
    assert sorted(seen) == list(range(samples))


def test_a_step_grows_until_it_has_as_many_micro_batches_as_there_may_be() -> None:
    data = Data(10**6, 100, 2, is_per_member=True)
    assert [data.span(0, members).samples for members in (1, 2, 81, 82, 1000)] == [100, 200, 8100, 8192, 8192]
    assert data.most_parts == data.parts(data.span(0, 82)) == MAX_PARTS
    assert Data(10**6, 100, 2).most_parts == 50
    assert Data(9, 100, 2, is_per_member=True).most_parts == 5


def test_the_randomness_of_a_micro_batch_is_its_own_and_the_same_each_time() -> None:
    data = Data(samples=10, batch=4, microbatch=3, seed=1)
    first = data.random(5, 0).random(4)
    assert np.array_equal(first, data.random(5, 0).random(4))
    others = [data.random(5, 1), data.random(6, 0), Data(10, 4, 3, seed=2).random(5, 0)]
    assert not any(np.array_equal(first, other.random(4)) for other in others)


@pytest.mark.parametrize("name", ["samples", "batch", "microbatch"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, None])
def test_a_number_that_no_run_can_have_is_named(name: str, value: object) -> None:
    numbers: dict[str, object] = {"samples": 10, "batch": 4, "microbatch": 2, name: value}
    with pytest.raises(InvalidArgumentError, match=name):
        Data(**numbers)  # pyright: ignore[reportArgumentType]


def test_a_data_set_whose_places_do_not_fit_into_64_bits_is_refused() -> None:
    assert 0 <= Data(2**62, 8, 2).part(Data(2**62, 8, 2).span(2**62 - 2), 0)[0] < 2**62
    with pytest.raises(InvalidArgumentError, match="samples"):
        Data(2**62 + 1, 8, 2)


def test_too_many_micro_batches_are_refused_with_the_advice_to_make_them_larger() -> None:
    Data(samples=10**6, batch=MAX_PARTS, microbatch=1)
    Data(samples=100, batch=10**6, microbatch=1)  # the batch is the whole data set
    with pytest.raises(InvalidArgumentError, match="larger"):
        Data(samples=10**6, batch=MAX_PARTS + 1, microbatch=1)


# --- dealing ----------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, MAX_PARTS), max_size=80), SPEEDS)
def test_every_missing_micro_batch_is_dealt_once_and_in_order(missing: set[int], speeds: list[int]) -> None:
    dealt = deal(sorted(missing), speeds)
    assert len(dealt) == len(speeds)
    assert [part for hand in dealt for part in hand] == sorted(missing)


@given(st.integers(0, 300), st.lists(st.integers(1, 1000), min_size=1, max_size=10))
def test_no_other_deal_is_done_earlier(parts: int, speeds: list[int]) -> None:
    counts = [len(hand) for hand in deal(range(parts), speeds)]
    for speed, count in zip(speeds, counts, strict=True):
        assert count >= parts * speed // sum(speeds)  # its whole share at least
    last = max((Fraction(count, speed) for count, speed in zip(counts, speeds, strict=True) if count), default=0)
    # Were everybody to stop just before, less than all would be done.
    assert sum((last * speed).__ceil__() - 1 for speed in speeds if last) < max(parts, 1)


def test_shares_are_in_proportion_where_that_comes_out_even() -> None:
    assert [len(hand) for hand in deal(range(12), [1, 2, 3])] == [2, 4, 6]
    assert [len(hand) for hand in deal(range(13), [5, 5])] == [7, 6]
    # One that is ten times as fast is done with ten before the slow one is done with its first.
    assert [len(hand) for hand in deal(range(10), [10, 1])] == [10, 0]


def test_an_unknown_speed_counts_as_the_mean_of_the_others() -> None:
    assert deal(range(60), [20, 0, 40]) == deal(range(60), [20, 30, 40])
    assert [len(hand) for hand in deal(range(9), [0, 0, 0])] == [3, 3, 3]
    assert deal(range(9), [-5, 3]) == deal(range(9), [3, 3])


def test_a_known_deal_never_changes() -> None:
    assert deal([2, 5, 6, 9, 11], [70, 100, 0]) == [(2,), (5, 6), (9, 11)]
    assert deal([], [1, 2]) == [(), ()]
