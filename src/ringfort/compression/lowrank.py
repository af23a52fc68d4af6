"""PowerSGD: a matrix as a product of two thin ones (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727). Pure.

For a matrix M and the thin Q of the previous step: P = M Q, made orthonormal; Q = Mᵀ P; the receiver gets P Qᵀ. This is
one step of the power method, which over many training steps finds the dominant directions. Factors are stored as rows.

What every rank computes for itself must have the same bits on any processor. So orthonormal P and the product P Qᵀ are
computed by single additions and products in a fixed order, and never by BLAS, whose order depends on the machine.
Floats follow IEEE 754 silently: a received factor may hold an infinity, and the product of large values may become one.
"""

from __future__ import annotations

from math import prod
from typing import Final
from zlib import crc32

import numpy as np

from ringfort.compression.codec import Codec
from ringfort.transport.reducer import Array

_ROOM: Final = 65536
"""Elements of the product to compute at a time: 256 KiB."""


def matrix_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """The rows and columns to treat an array as; None if two factors would not be smaller than the array."""
    if len(shape) < 2:
        return None
    rows, columns = shape[0], prod(shape[1:])
    return (rows, columns) if 0 < rank * (rows + columns) < rows * columns else None


def first_factor(rank: int, columns: int, name: str) -> Array:
    """The start of the power method: the same on every rank, derived from the tensor's name."""
    random = np.random.Generator(np.random.PCG64(crc32(name.encode())))
    return (random.random((rank, columns)) - 0.5).astype(np.float32)


def orthonormal(factor: Array) -> Array:
    """Make the rows orthonormal, one after the other; rows that depend on earlier ones become zero."""
    with np.errstate(all="ignore"):
        wide = factor.astype(np.float64)
        for place in range(len(wide)):
            row = wide[place]
            before = float(np.sqrt((row * row).sum()))
            for earlier in wide[:place]:
                row -= (row * earlier).sum() * earlier
            length = float(np.sqrt((row * row).sum()))
            # What is left of a row that depends on the others is only rounding error, in any direction.
            row *= 1 / length if length > 1e-6 * before else 0.0
        return wide.astype(np.float32)


def unit_rows(factor: Array) -> Array:
    """Scale each row to length 1: the start of the next step, whatever the size of the gradients."""
    with np.errstate(all="ignore"):
        wide = factor.astype(np.float64)
        lengths = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
        wide /= np.where(lengths > 0, lengths, 1)
        return wide.astype(np.float32)


def product(p: Array, q: Array, out: Array, combine: np.ufunc | None = None) -> None:
    """Compute `out = pᵀ q`, or with `combine` `out = combine(out, pᵀ q)`; the same bits on any processor."""
    columns = q.shape[1]
    step = max(1, _ROOM // max(columns, 1))
    total, one = np.empty((2, step, columns), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, p.shape[1], step):
            into = out[start : start + step]
            height = len(into)
            np.multiply(p[0, start : start + step, None], q[0], out=total[:height])
            for row in range(1, len(p)):
                np.multiply(p[row, start : start + step, None], q[row], out=one[:height])
                total[:height] += one[:height]
            if combine is None:
                into[...] = total[:height]
            else:
                combine(into, total[:height], out=into)


class LowRank(Codec):
    """One matrix as two factors, by one rank alone. `factor` is the start of the next step."""

    def __init__(self, rows: int, columns: int, factor: Array) -> None:
        self._rows, self._columns, self.factor = rows, columns, factor

    def nbytes(self, count: int) -> int:
        return 4 * len(self.factor) * (self._rows + self._columns)

    def encode(self, values: Array, out: Array, seed: int, *, keep_error: bool = False) -> None:
        matrix = values.reshape(self._rows, self._columns)
        p = orthonormal(self.factor @ matrix.T)
        q = p @ matrix
        self._cut(out)[0][...] = p
        self._cut(out)[1][...] = q
        self.factor = unit_rows(q)
        if keep_error:
            product(p, q, matrix, np.subtract)

    def decode(self, data: Array, out: Array, *, add: bool = False) -> None:
        self.check_size(data, out.size)
        product(*self._cut(data), out.reshape(self._rows, self._columns), np.add if add else None)

    def _cut(self, data: Array) -> tuple[Array, Array]:
        rank, numbers = len(self.factor), data.view(np.float32)
        edge = rank * self._rows
        return numbers[:edge].reshape(rank, -1), numbers[edge:].reshape(rank, -1)
