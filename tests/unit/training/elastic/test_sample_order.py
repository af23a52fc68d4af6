"""The order of samples: a permutation that every machine computes for itself, the same in every release."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ringfort.errors import InvalidArgumentError
from ringfort.training.elastic.sample_order import random_key, sample_order

SEEDS = st.integers(-(2**70), 2**70)
PASSES = st.integers(0, 2**40)


@given(SEEDS, PASSES, st.integers(1, 3000))
def test_a_pass_has_each_sample_once(seed: int, number: int, samples: int) -> None:
    order = sample_order(seed, number, samples, 0, samples)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(samples))


@given(SEEDS, PASSES, st.integers(1, 500), st.data())
def test_parts_of_the_order_make_up_the_whole(seed: int, number: int, samples: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, samples), max_size=5)))
    edges = [0, *cuts, samples]
    parts = [sample_order(seed, number, samples, a, b) for a, b in pairwise(edges)]
    assert np.array_equal(np.concatenate(parts), sample_order(seed, number, samples, 0, samples))


@given(SEEDS, PASSES)
def test_another_seed_or_another_pass_has_another_order(seed: int, number: int) -> None:
    order = sample_order(seed, number, 100, 0, 100)
    assert not np.array_equal(order, sample_order(seed + 1, number, 100, 0, 100))
    assert not np.array_equal(order, sample_order(seed, number + 1, 100, 0, 100))


@pytest.mark.parametrize(
    ("seed", "number", "samples", "begin", "expected"),
    [
        (0, 0, 1, 0, [0]),
        (0, 0, 10, 0, [3, 5, 7, 1, 6, 9, 0, 8, 2, 4]),
        (0, 1, 10, 0, [8, 1, 0, 2, 5, 9, 7, 6, 3, 4]),
        (1, 0, 10, 0, [8, 0, 7, 3, 6, 9, 1, 4, 5, 2]),
        (-5, 3, 1000, 990, [791, 9, 862, 1, 713, 491, 769, 839, 509, 94]),
        (18446744073709551619, 7, 50000000000, 12345678901, [10788052969, 6407781301, 12291285128, 20793697506]),
    ],
)
def test_the_order_never_changes(seed: int, number: int, samples: int, begin: int, expected: list[int]) -> None:
    found = sample_order(seed, number, samples, begin, begin + len(expected))
    assert found.tolist() == expected, "runs that continue from a checkpoint would see samples twice"


def test_the_keys_of_randomness_never_change() -> None:
    assert [random_key(0), random_key(0, 0), random_key(7, 3, 1), random_key(-1, 2)] == [
        16294208416658607535,
        15204172177749531820,
        2755798167786195710,
        3808038166559322225,
    ]


def test_a_place_of_a_huge_data_set_costs_no_memory() -> None:
    samples = 10**15
    found = sample_order(1, 0, samples, samples - 1000, samples)
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < samples


def test_each_sample_is_about_as_often_in_each_place() -> None:
    samples, passes = 16, 4000
    found = np.zeros((samples, samples))
    for number in range(passes):
        found[np.arange(samples), sample_order(5, number, samples, 0, samples)] += 1
    usual = passes / samples
    # 225 degrees of freedom: 330 is passed by chance once in a million. The seed is fixed.
    assert float(((found - usual) ** 2 / usual).sum()) < 330


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (4, 3), (0, 11), (11, 12)])
def test_a_place_outside_the_pass_is_an_error_and_not_an_endless_walk(begin: int, end: int) -> None:
    with pytest.raises(InvalidArgumentError, match="10 samples"):
        sample_order(0, 0, 10, begin, end)


def test_an_empty_part_is_empty() -> None:
    assert sample_order(0, 0, 10, 10, 10).size == 0
