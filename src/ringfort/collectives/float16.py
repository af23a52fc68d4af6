"""Arithmetic on 16-bit floats: computed in float32 and rounded once, to nearest even, by the fastest means at hand.

Those are torch where the program has imported it, for bfloat16 `ml_dtypes` likewise, and NumPy. Ranks may differ in
what they have imported and must end with the same bits, so one rule is added to IEEE 754's: a NaN comes out as the
plain one, because the means differ in the sign and payload they give it (torch differs from itself: its vectors give
0xFFFF, the rest of an array 0x7FC0).

One core, spans of 256 KiB, GB/s of one operand: adding float16 torch 5, here 0.6, NumPy's own 0.18; adding bfloat16
torch 3.6, `ml_dtypes` 1.6 with its conversions and 0.8 with its own addition, NumPy 1.15.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

from ringfort.transport.reducer import Array

BLOCK: Final = 16384
"""Elements that are widened at a time: scratch of 128 KiB, which stays in the L2 cache."""

SMALL: Final = 1024
"""Elements below which NumPy is as quick as any: each call of torch costs microseconds."""

_TORCH_BLOCK: Final = 32704
"""Elements that torch is given at a time. From 32768 it would share the work with threads of its own, on cores that
training and the other ranks want. Each piece costs 5 microseconds, so it is cut only where torch has threads."""


class Half(NamedTuple):
    """A 16-bit float."""

    name: str
    infinity: int
    """Its bits; those of a NaN are larger, the sign apart."""
    nan: int
    """The bits of every NaN that comes out."""


FLOAT16: Final = Half("float16", 0x7C00, 0x7E00)
BFLOAT16: Final = Half("bfloat16", 0x7F80, 0x7FC0)


def reducer(half: Half, ufunc: np.ufunc, into: Array, span: Array, means: Means | None = None) -> None:
    """`into = ufunc(into, span)` on contiguous arrays of 16-bit elements: add, multiply, minimum or maximum. `means` is
    for tests."""
    with np.errstate(all="ignore"):
        if ufunc in _ORDERED:
            _fold_ordered(half, ufunc, into, span)
        else:
            (means or best_means(into.size)).reducer(half, ufunc, into, span)
            _plain_nans(half, into)


def scale(half: Half, ufunc: np.ufunc, array: Array, by: float, means: Means | None = None) -> None:
    """`array = ufunc(array, by)`, with `by` as a float32."""
    with np.errstate(all="ignore"):
        (means or best_means(array.size)).scale(half, ufunc, array, np.float32(by))
        _plain_nans(half, array)


def _plain_nans(half: Half, array: Array) -> None:
    if _has_nan(half, array):
        array.view(np.uint16)[_nans(half, array)] = half.nan


def _has_nan(half: Half, array: Array) -> bool:
    # Two reads of what is in the cache: the largest of the negative, the largest of the positive.
    bits = array.view(np.uint16)
    return bool(bits.size and (bits.max() > half.infinity | 0x8000 or bits.view(np.int16).max() > half.infinity))


def _nans(half: Half, array: Array) -> Array:
    return array.view(np.uint16) & 0x7FFF > half.infinity


# --- the least and the greatest ---------------------------------------------------------------------------------------

_ORDERED: Final = frozenset({np.minimum, np.maximum})


def _fold_ordered(half: Half, ufunc: np.ufunc, into: Array, span: Array) -> None:
    """As integers, which have the order of the floats: nothing is rounded, so there is nothing to widen.

    -0 is below +0, where float32s leave it to the processor; and a NaN wins.
    """
    for start in range(0, into.size, BLOCK):
        block, other = into[start : start + BLOCK], span[start : start + BLOCK]
        nans = None
        if _has_nan(half, block) or _has_nan(half, other):
            nans = _nans(half, block) | _nans(half, other)
        keys = _flip_negative(block.view(np.int16))
        ufunc(keys, _flip_negative(other.view(np.int16)), out=keys)
        block.view(np.int16)[...] = _flip_negative(keys)
        if nans is not None:
            block.view(np.uint16)[nans] = half.nan


def _flip_negative(bits: Array) -> Array:
    """Turn the bits of floats into integers of the same order, and back: of negative floats, the larger magnitude is
    less."""
    flipped = bits >> 15
    flipped &= 0x7FFF
    flipped ^= bits
    return flipped


# --- the rest: one means or another -----------------------------------------------------------------------------------


def best_means(size: int = BLOCK) -> Means:
    """Return the fastest available means for `size` elements, without importing anything."""
    if size >= SMALL:
        torch = sys.modules.get("torch")
        found = None if torch is None else _torch_means(torch)
        if found is not None:
            return found
        ml_dtypes: Any = sys.modules.get("ml_dtypes")
        if hasattr(ml_dtypes, "bfloat16"):
            return _ml_dtypes_means(ml_dtypes.bfloat16)
    return NUMPY


class Means:
    """What every Python with NumPy can do."""

    def reducer(self, half: Half, ufunc: np.ufunc, into: Array, span: Array) -> None:
        """`into = ufunc(into, span)`, with any NaNs."""
        if half is FLOAT16 and ufunc is np.add and into.size >= SMALL:
            for start in range(0, into.size, BLOCK):
                _add_float16(into[start : start + BLOCK], span[start : start + BLOCK])
        elif half is FLOAT16:
            ufunc(into, span, out=into)  # NumPy's own loops compute in float32 and round once
        else:
            for start in range(0, into.size, BLOCK):
                block = into[start : start + BLOCK]
                wide = self.widen(half, block)
                ufunc(wide, self.widen(half, span[start : start + BLOCK]), out=wide)
                self.narrow(half, wide, block)

    def scale(self, half: Half, ufunc: np.ufunc, array: Array, by: np.float32) -> None:
        """`array = ufunc(array, by)`, with any NaNs."""
        for start in range(0, array.size, BLOCK):
            block = array[start : start + BLOCK]
            wide = self.widen(half, block)
            ufunc(wide, by, out=wide)
            self.narrow(half, wide, block)

    def widen(self, half: Half, block: Array) -> Array:
        """Return the same numbers as float32."""
        if half is FLOAT16:
            return block.astype(np.float32)
        bits = block.astype(np.uint32)
        bits <<= 16  # a bfloat16 is the upper half of the float32 of the same value
        return bits.view(np.float32)

    def narrow(self, half: Half, wide: Array, block: Array) -> None:
        """Round float32 to 16 bits, to nearest even. May overwrite `wide`."""
        if half is FLOAT16:
            block[...] = wide
            return
        # Adding to the bits carries into the exponent just as rounding up must, up to infinity. It cannot carry a NaN
        # into another number: the NaNs of arithmetic on widened values have payloads that end in 16 zeros.
        bits = wide.view(np.uint32)
        round_bits(bits, 16)
        bits >>= 16
        block[...] = bits


NUMPY: Final = Means()


def _add_float16(into: Array, span: Array) -> None:
    """The sum in float32s of the same bits, shifted to their places: they mean 2**-112 times the number.

    That is exact, and so is every sum that would be a subnormal float16: both are whole multiples of the smallest one.
    Exponents that could overflow, or mean infinity or NaN, are left to NumPy.
    """
    if _has_large(into) or _has_large(span):
        np.add(into, span, out=into)
        return
    wide = _shift_out(into)
    wide.view(np.float32)[...] += _shift_out(span).view(np.float32)
    bits = wide.view(np.uint32)
    sign = bits >> 16
    sign &= 0x8000
    round_bits(bits, 13)
    bits >>= 13
    bits |= sign
    into.view(np.uint16)[...] = bits  # the sign that was shifted along lies above these 16 bits


def round_bits(bits: Array, shift: int, scratch: Array | None = None) -> None:
    """Add to unsigned integers what makes them round to nearest even when they are shifted right."""
    odd = np.right_shift(bits, shift, out=scratch)
    odd &= 1
    bits += odd
    bits += (1 << (shift - 1)) - 1


def _has_large(array: Array) -> bool:
    """Whether an element is 32768 or more, infinite or NaN."""
    return bool(array.view(np.int16).max() >= 0x7800 or array.view(np.uint16).max() >= 0xF800)


def _shift_out(array: Array) -> Array:
    wide = array.view(np.int16).astype(np.int32)  # which repeats the sign in the upper half
    wide <<= 13
    wide &= -0x70000001  # all but the three repeated signs below the highest
    return wide


class _MlDtypesMeans(Means):
    """bfloat16 by the conversions of ml_dtypes: its arithmetic is slower than ours."""

    def __init__(self, bfloat16: Any) -> None:
        self._bfloat16 = np.dtype(bfloat16)

    def widen(self, half: Half, block: Array) -> Array:
        return super().widen(half, block) if half is FLOAT16 else block.view(self._bfloat16).astype(np.float32)

    def narrow(self, half: Half, wide: Array, block: Array) -> None:
        if half is FLOAT16:
            block[...] = wide
        else:
            block.view(self._bfloat16)[...] = wide.astype(self._bfloat16)


class _TorchMeans(Means):
    """Both by torch: sums and products by its own, scales by its conversions and NumPy's float32."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._types = {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}
        self._in_place: dict[np.ufunc, Any] = {np.add: torch.Tensor.add_, np.multiply: torch.Tensor.mul_}

    def reducer(self, half: Half, ufunc: np.ufunc, into: Array, span: Array) -> None:
        in_place = self._in_place[ufunc]
        x, y = self._tensor(half, into), self._tensor(half, span)
        if into.size <= _TORCH_BLOCK or self._torch.get_num_threads() == 1:
            in_place(x, y)
            return
        for part, other in zip(x.split(_TORCH_BLOCK), y.split(_TORCH_BLOCK), strict=True):
            in_place(part, other)

    def widen(self, half: Half, block: Array) -> Array:
        wide = np.empty(block.size, np.float32)
        self._torch.from_numpy(wide).copy_(self._tensor(half, block))
        return wide

    def narrow(self, half: Half, wide: Array, block: Array) -> None:
        self._tensor(half, block).copy_(self._torch.from_numpy(wide))

    def _tensor(self, half: Half, array: Array) -> Any:
        # A tensor of read-only memory draws a warning, though nothing is written to it here.
        readable = array if array.flags.writeable else array.copy()
        return self._torch.from_numpy(readable.view(np.int16)).view(self._types[half])


@cache
def _torch_means(torch: ModuleType) -> Means | None:
    """None where this torch cannot do it: one that was built for another NumPy, or is not wholly imported."""
    try:
        means = _TorchMeans(torch)
        reducer(BFLOAT16, np.add, np.zeros(1, np.uint16), np.zeros(1, np.uint16), means)
    except Exception:  # a foreign library in a state that nobody foresaw: only slower without it
        return None
    return means


_ml_dtypes_means: Final = cache(_MlDtypesMeans)
