"""Expected results, computed by NumPy: the ranks' parts, their reduction, and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as left_reducer
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ringfort.backends.base import Backend
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.context import DistributedContext

Array = npt.NDArray[Any]

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
"""All dtypes of NumPy itself that collectives support."""

UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (0,), (3, 0, 2), (2, 3, 4))


def part_of(rank: int, shape: tuple[int, ...], dtype: str, *, seed: int = 0) -> Array:
    """The part of `rank`: numbers so small that their sum does not depend on the order of additions."""
    numbers = np.random.default_rng([rank, seed]).integers(0, 4, shape)
    if dtype == "bool":
        return np.asarray(numbers > 1)
    array = np.asarray(numbers, dtype)
    return array + array[..., ::-1] * 1j if array.ndim and np.dtype(dtype).kind == "c" else array


def parts_of(
    context: DistributedContext, shape: tuple[int, ...], dtype: str, *, seed: int = 0
) -> tuple[list[Array], Array]:
    """The parts of all ranks, and a copy of this rank's."""
    parts = [part_of(rank, shape, dtype, seed=seed).astype(dtype) for rank in range(context.world_size)]
    return parts, parts[context.rank].copy()


def reduced(parts: Sequence[Array], op: ReduceOp = ReduceOp.SUM) -> Array:
    """The reduction of `parts`. For PREMUL_SUM, each rank passed the op that `op_of` returns."""
    n, dtype = len(parts), parts[0].dtype
    if op is ReduceOp.PREMUL_SUM:
        return sum((part * dtype.type(rank + 1) for rank, part in enumerate(parts)), np.zeros_like(parts[0]))
    if op is ReduceOp.MEAN:
        total = left_reducer(np.add, parts)
        return np.asarray(total // n if dtype.kind in "iu" else total / n).astype(dtype)
    return np.asarray(left_reducer(UFUNCS[op], parts)).astype(dtype)


def meaningful() -> list[tuple[str, ReduceOp]]:
    """All pairs of a dtype and an op that is defined for it."""
    bitwise = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
    undefined = {"b": {ReduceOp.MEAN, ReduceOp.PREMUL_SUM}, "f": bitwise, "c": bitwise | {ReduceOp.MIN, ReduceOp.MAX}}
    return [(dtype, op) for dtype in DTYPES for op in ReduceOp if op not in undefined.get(np.dtype(dtype).kind, ())]


def op_of(op: ReduceOp, rank: int) -> Op:
    """The op that `rank` passes for `op`."""
    return ReduceOp.premul_sum(rank + 1) if op is ReduceOp.PREMUL_SUM else op


def assert_equal(got: Any, expected: Array, what: str) -> None:
    """Fail unless shape, dtype and values are equal; floats may differ in the last place."""
    assert isinstance(got, np.ndarray), f"{what}: {type(got).__name__} is not an array"
    got = cast(Array, got)
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape}, expected {expected.shape}"
    tolerance = 2 * np.finfo(expected.dtype).eps if expected.dtype.kind in "fc" else 0.0
    assert np.allclose(got, expected, rtol=float(tolerance), atol=0), f"{what}: {got}, expected {expected}"


def assert_same_everywhere(backend: Backend, array: Array, what: str) -> None:
    """Fail unless all ranks have the same bits: each compares with its neighbour."""
    n = backend.world_size
    mine, theirs = blake2b(array.tobytes()).digest(), bytearray(64)
    backend.exchange(mine, (backend.rank + 1) % n, theirs, (backend.rank - 1) % n, tag=99)
    assert mine == theirs, f"{what}: ranks {backend.rank} and {(backend.rank - 1) % n} have different bits"
