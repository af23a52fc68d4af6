"""Conversion of arrays of any float type to float32 and back; infinities and NaNs."""

from __future__ import annotations

from typing import Final

import numpy as np

from ringfort.collectives import float16
from ringfort.collectives.arrays import ArrayView
from ringfort.compression.codec import CHUNK
from ringfort.transport.reducer import Array

_BLOCK: Final = float16.BLOCK


def widen(view: ArrayView, factor: float, *, copy: bool) -> Array:
    """The elements times `factor` as float32: a copy if `copy`, else the array's own memory where possible."""
    flat = view.flat
    if view.kind.name == "bfloat16":
        means, wide = float16.best_means(), np.empty(flat.size, np.float32)
        for start in range(0, flat.size, _BLOCK):
            wide[start : start + _BLOCK] = means.widen(float16.BFLOAT16, flat[start : start + _BLOCK])
    elif flat.dtype != np.float32 or copy:
        with np.errstate(over="ignore"):
            wide = flat.astype(np.float32)
    else:
        wide = flat
    if factor != 1.0:
        wide = wide.copy() if wide is flat else wide
        with np.errstate(all="ignore"):
            wide *= np.float32(factor)
    return wide


def narrow(wide: Array, view: ArrayView) -> None:
    """Write the elements back into the array, rounded to its type."""
    if view.kind.name == "bfloat16":
        for start in range(0, wide.size, _BLOCK):
            # NumPy's kernels on every rank: all must round alike.
            float16.NUMPY.narrow(float16.BFLOAT16, wide[start : start + _BLOCK], view.flat[start : start + _BLOCK])
    elif view.flat is not wide:
        with np.errstate(over="ignore"):
            view.flat[...] = wide


def count_nonfinite(flat: Array) -> int:
    """How many elements are infinite or NaN."""
    with np.errstate(all="ignore"):
        # One fast pass: its result is finite unless an element is infinite, NaN or very large.
        if np.isfinite(np.dot(flat, flat)):
            return 0
    return sum(int(np.count_nonzero(~np.isfinite(flat[start : start + CHUNK]))) for start in range(0, flat.size, CHUNK))


def replace_nonfinite(flat: Array, how: str) -> None:
    """Replace infinities and NaNs by 0; with `clip`, infinities by the largest finite magnitude in the array."""
    bad = ~np.isfinite(flat)
    limit = np.abs(flat[~bad]).max(initial=0.0) if how == "clip" else 0.0
    signs = np.sign(np.nan_to_num(flat[bad], nan=0.0))
    flat[bad] = signs * np.float32(limit)
