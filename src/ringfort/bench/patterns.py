"""Known contents of buffers, so that a benchmark never measures wrong results; checked without large temporaries.

The elements of a rank are a fixed pattern times a small factor of the rank. All sums of them are small whole numbers,
which every element type represents exactly, so results are compared for equality.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringfort.bench.options import Case
from ringfort.errors import BackendUnavailableError, DistributedError

Array = NDArray[Any]

PERIOD = 251
"""Elements until the pattern repeats. A prime number, so that a misplaced slice does not match."""
CHUNK = PERIOD * 256
"""Elements that are compared at a time: the temporary stays in the cache."""
GIVES_ROWS = ("scatter", "reduce_scatter", "all_to_all")
"""Operations whose input has a row for each rank."""
GATHERS = ("gather", "all_gather")
"""Operations whose input is one row of their result."""


class WrongResultError(DistributedError):
    """A collective of an engine returned a wrong result."""

    is_fatal = True

    def __init__(self, engine: str, case: Case, rank: int, element: int) -> None:
        super().__init__(
            f"{engine}: {case.op} of {case.nbytes} bytes of {case.dtype} among {case.world_size} ranks is wrong "
            f"at rank {rank}, element {element}",
            peer=rank,
        )


def element_type(name: str) -> np.dtype[Any]:
    """The NumPy dtype called `name`. Raises `BackendUnavailableError` if it needs a package that is missing."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as exc:
        raise BackendUnavailableError("bfloat16 in NumPy", "pip install ml_dtypes") from exc
    return np.dtype(ml_dtypes.bfloat16)


def factor(rank: int) -> int:
    """The factor of a rank: one of three values, so that most neighbours differ."""
    return rank % 3 + 1


def pattern(dtype: np.dtype[Any], times: int, shift: int = 0) -> Array:
    """One period of the values 1 to 3, multiplied by `times`, from element `shift` on."""
    values = np.random.default_rng(0).integers(1, 4, PERIOD)
    return (np.roll(values, -shift) * times).astype(dtype)


def new_source(case: Case, rank: int) -> Array | None:
    """The input buffer of `rank`; None if it has no input."""
    if case.op == "barrier" or (case.op == "scatter" and rank != 0):
        return None
    row = case.part if case.op in (*GIVES_ROWS, *GATHERS) else case.count
    return np.zeros((case.world_size, row) if case.op in GIVES_ROWS else row, element_type(case.dtype))


def fill(array: Array, rank: int) -> None:
    """Write the contents of `rank`. Each row of a buffer starts one element later in the pattern."""
    rows = array if array.ndim == 2 else array[None]
    for shift, row in enumerate(rows):
        chunk = np.resize(pattern(array.dtype, factor(rank), shift), CHUNK)
        for start in range(0, len(row), CHUNK):
            part = row[start : start + CHUNK]
            part[...] = chunk[: len(part)]


def expected_rows(case: Case, rank: int) -> list[Array] | None:
    """One period of each row of the result at `rank`; None if it has no result."""
    if case.op in ("reduce", "gather") and rank != 0:
        return None
    factors = [factor(other) for other in range(case.world_size)]  # a row of the result per rank
    if "reduce" in case.op:
        factors = [sum(factors)]
    elif case.op in ("broadcast", "scatter"):
        factors = factors[:1]
    shift = rank if case.op in GIVES_ROWS else 0
    return [pattern(element_type(case.dtype), times, shift) for times in factors]


def first_difference(case: Case, rank: int, result: Array) -> int | None:
    """The index of the first wrong element of `result`, or None."""
    rows = expected_rows(case, rank)
    if rows is None:
        return None
    got = result.reshape(len(rows), -1)
    for index, row in enumerate(rows):
        chunk = np.resize(row, CHUNK)
        for start in range(0, got.shape[1], CHUNK):
            part = got[index, start : start + CHUNK]
            wrong = np.flatnonzero(part != chunk[: len(part)])
            if wrong.size:
                return index * got.shape[1] + start + int(wrong[0])
    return None
