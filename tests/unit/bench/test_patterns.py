"""The benchmark's check of results: right ones pass, and every kind of wrong one is found."""

from __future__ import annotations

import numpy as np
import pytest

from ringfort.bench.options import DTYPES, OPS, Case
from ringfort.bench.patterns import Array, fill, first_difference, new_source

RANKS = 4


def collective(case: Case) -> list[Array | None]:
    """What each rank must get, by the definition of the operation and NumPy alone."""
    sources = [new_source(case, rank) for rank in range(RANKS)]
    for rank, given in enumerate(sources):
        if given is not None:
            fill(given, rank)
    given = [array for array in sources if array is not None]
    total = np.sum(given, axis=0, dtype=given[0].dtype) if len(given) == RANKS else given[0]
    results = {
        "all_reduce": lambda rank: total,
        "reduce": lambda rank: total if rank == 0 else None,
        "broadcast": lambda rank: given[0],
        "all_gather": lambda rank: np.stack(given),
        "gather": lambda rank: np.stack(given) if rank == 0 else None,
        "scatter": lambda rank: given[0][rank],
        "reduce_scatter": lambda rank: total[rank],
        "all_to_all": lambda rank: np.stack([array[rank] for array in given]),
    }
    return [results[case.op](rank) for rank in range(RANKS)]


DATA_OPS = [op for op in OPS if op != "barrier"]


@pytest.mark.parametrize("op", DATA_OPS)
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
def test_right_results_pass(op: str, dtype: str) -> None:
    case = Case.of(op, 300_000, dtype, RANKS)
    for rank, result in enumerate(collective(case)):
        assert result is None or first_difference(case, rank, result) is None


@pytest.mark.parametrize("op", DATA_OPS)
def test_a_wrong_element_is_found_where_it_is(op: str) -> None:
    case = Case.of(op, 4 * 70_000 * RANKS, "float32", RANKS)
    result = collective(case)[0]
    assert result is not None
    result = result.copy()
    result.reshape(-1)[-1] += 1
    assert first_difference(case, 0, result) == result.size - 1


@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "reduce"])
def test_slices_that_changed_places_are_found(op: str) -> None:
    case = Case.of(op, 4096, "float32", RANKS)
    result = collective(case)[0]
    assert result is not None
    assert first_difference(case, 0, np.roll(result, 256)) is not None


@pytest.mark.parametrize("op", ["all_gather", "gather", "all_to_all"])
def test_neighbours_that_changed_places_are_found(op: str) -> None:
    case = Case.of(op, 4096, "float32", RANKS)
    result = collective(case)[0]
    assert result is not None
    assert first_difference(case, 0, result[[1, 0, 2, 3]]) is not None


@pytest.mark.parametrize("op", ["scatter", "reduce_scatter", "all_to_all"])
def test_another_ranks_part_is_found(op: str) -> None:
    case = Case.of(op, 4096, "float32", RANKS)
    result = collective(case)[1]
    assert result is not None
    assert first_difference(case, 0, result) is not None


@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "reduce_scatter"])
def test_doing_nothing_is_found(op: str) -> None:
    case = Case.of(op, 4096, "float32", RANKS)
    given = new_source(case, 1)
    assert given is not None
    fill(given, 1)
    assert first_difference(case, 1, given if given.ndim == 1 else given[1]) is not None


def test_bfloat16_is_as_good_as_any() -> None:
    pytest.importorskip("ml_dtypes")
    case = Case.of("broadcast", 3000, "bfloat16", RANKS)
    for rank, result in enumerate(collective(case)):
        assert result is not None
        assert first_difference(case, rank, result) is None


def test_ranks_that_give_nothing_have_no_buffer() -> None:
    assert new_source(Case.of("scatter", 64, "float32", RANKS), 1) is None
    assert new_source(Case("barrier", 0, "float32", RANKS), 0) is None
