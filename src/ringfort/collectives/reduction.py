"""Element types, and the arithmetic of each reduction on them.

Integers wrap on overflow and floats follow IEEE 754, both silently: a warning on one rank of many helps nobody. The sum
of bools is their OR and the product their AND. 16-bit floats have a module of their own, `halves`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from math import isnan, nan
from numbers import Real
from typing import Any, Final

import numpy as np

from ringfort.collectives import float16
from ringfort.collectives.ops import Op, PremulSum, ReduceOp
from ringfort.errors import InvalidArgumentError, UnsupportedArrayError, UnsupportedOpError
from ringfort.transport.reducer import Array, Reducer

BLOCK: Final = float16.BLOCK
"""Elements that are widened at a time: scratch of 128 KiB, which stays in the L2 cache."""

# --- element types ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # one object a type, compared by identity: quick to hash
class ElementType:
    """What one element is. `code` goes over the wire and never changes."""

    name: str
    code: int
    kind: str
    """NumPy's letter: b(ool), i(nteger), u(nsigned), f(loat), c(omplex)."""
    storage: np.dtype[Any]
    """What NumPy sees; for bfloat16, which NumPy does not know, its bits as uint16."""

    @cached_property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.storage.itemsize


def _table() -> tuple[ElementType, ...]:
    named = (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"
    )
    types: list[ElementType] = []
    for code, name in enumerate(named.split(), start=1):
        storage = np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")
        types.append(ElementType(name, code, "f" if name == "bfloat16" else storage.kind, storage))
    return tuple(types)


ELEMENT_TYPES: Final = _table()
"""Every element type. A new one goes at the end, because the place gives the code."""

_BY_NAME: Final = {kind.name: kind for kind in ELEMENT_TYPES}
_BY_CODE: Final = {kind.code: kind for kind in ELEMENT_TYPES}
_BY_LAYOUT: Final = {(kind.kind, kind.itemsize): kind for kind in ELEMENT_TYPES if kind.name != "bfloat16"}
_UNSUPPORTED: Final = f"unsupported element type; use one of: {', '.join(_BY_NAME)}"
_BFLOAT16: Final = _BY_NAME["bfloat16"]
_HALVES: Final = {half.name: half for half in (float16.FLOAT16, float16.BFLOAT16)}


def element_type(dtype: np.dtype[Any], *, name: str = "dtype") -> ElementType:
    """Return the element type of arrays of `dtype`. Raises `UnsupportedArrayError` about the argument `name`."""
    found = _find(dtype)
    if isinstance(found, str):
        raise UnsupportedArrayError(name, dtype, found)
    return found


@lru_cache(maxsize=256)  # NumPy takes microseconds to name a dtype
def _find(dtype: np.dtype[Any]) -> ElementType | str:
    if dtype.name == "bfloat16":  # a guest in NumPy, from ml_dtypes: its letter is V, like a structure's
        return _BFLOAT16
    found = _BY_LAYOUT.get((dtype.kind, dtype.itemsize))
    if found is None:
        return _UNSUPPORTED
    if dtype.str.startswith(">"):
        return "elements must be little-endian; pass x.astype(x.dtype.newbyteorder('<'))"
    return found


def element_type_named(name: str) -> ElementType:
    """Return the element type called `name`. Raises `UnsupportedArrayError` if there is none."""
    found = _BY_NAME.get(name)
    if found is None:
        raise UnsupportedArrayError("dtype", name, _UNSUPPORTED)
    return found


def by_code(code: int) -> ElementType:
    """Return the element type with the wire's `code`. Raises `InvalidArgumentError` if there is none."""
    found = _BY_CODE.get(code)
    if found is None:
        raise InvalidArgumentError("code", code, f"must be the code of an element type, 1 to {len(ELEMENT_TYPES)}")
    return found


# --- ops --------------------------------------------------------------------------------------------------------------

_UFUNCS: Final[dict[ReduceOp, np.ufunc]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PREMUL_SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,  # these two propagate NaN, where fmin and fmax drop it
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}

_MEANINGLESS: Final = (
    ((ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR), "fc", "bitwise reductions need bools or integers"),
    ((ReduceOp.MIN, ReduceOp.MAX), "c", "complex numbers have no order"),
    ((ReduceOp.MEAN, ReduceOp.PREMUL_SUM), "b", "bools cannot be scaled"),
)
"""Ops, the kinds of elements that they have no meaning for, and why."""


def code_of(op: Op) -> int:
    """Return the wire's code of `op`. It does not include the factor of a PREMUL_SUM, which may differ by rank."""
    return _reduction(op).value


def describe(op: Op) -> str:
    """Return the name of `op`, for messages that compare what ranks called."""
    return _reduction(op).name


def summed(op: Op) -> str:
    """Return the name of the op that `op` is without its scaling: what engines are asked for."""
    name = describe(op)
    return ReduceOp.SUM.name if name in (ReduceOp.MEAN.name, ReduceOp.PREMUL_SUM.name) else name


def needs_scale_before(op: Op) -> bool:
    """Whether every rank must `scale_before` its array before the first step."""
    return isinstance(op, PremulSum)


def _reduction(op: object) -> ReduceOp:
    if isinstance(op, PremulSum):
        return ReduceOp.PREMUL_SUM
    if not isinstance(op, ReduceOp):
        raise InvalidArgumentError("op", op, "must be a ReduceOp, such as ReduceOp.SUM")
    if op is ReduceOp.PREMUL_SUM:
        raise InvalidArgumentError("op", op, "missing its factor; use ReduceOp.premul_sum(factor)")
    return op


def _factor(op: PremulSum, kind: ElementType) -> int | float:
    """Return the factor as a number that elements of `kind` can be multiplied by."""
    factor: object = op.factor
    if isinstance(factor, bool) or not isinstance(factor, Real):  # NumPy's numbers are Real too
        raise InvalidArgumentError("factor", factor, "must be a real number")
    try:
        number = int(factor) if kind.kind in "iu" and factor == int(factor) else float(factor)
    except (OverflowError, ValueError) as exc:  # a whole number beyond all floats; the whole part of inf or nan
        raise InvalidArgumentError("factor", factor, f"too large for elements of {kind.name}") from exc
    if kind.kind in "iu":
        limits = np.iinfo(kind.storage)
        # An exact product, or none: a fraction would have to be rounded on every rank before the sum.
        if isinstance(number, float) or not limits.min <= number <= limits.max:
            why = f"must be a whole number from {limits.min} to {limits.max} for elements of {kind.name}"
            raise InvalidArgumentError("factor", factor, why)
    return number


# --- reducing ---------------------------------------------------------------------------------------------------------


def reducer(op: Op, kind: ElementType) -> Reducer:
    """How the elements of two ranks become one. MEAN and PREMUL_SUM reduce as SUM and are scaled apart.

    Raises `UnsupportedOpError` where `op` has no meaning for `kind`, and `InvalidArgumentError` for what is no op or
    has a factor that cannot be used.
    """
    found = _reduce(_reduction(op), kind)
    if isinstance(op, PremulSum):
        _factor(op, kind)
    return found


@cache  # at most every op with every element type
def _reduce(op: ReduceOp, kind: ElementType) -> Reducer:
    for ops, kinds, why in _MEANINGLESS:
        if op in ops and kind.kind in kinds:
            raise UnsupportedOpError(op.name, kind.name, why)
    ufunc = _UFUNCS[op]
    half = _HALVES.get(kind.name)
    if half is not None:
        return Reducer(kind.storage, partial(float16.reducer, half, ufunc))

    def apply(into: Array, span: Array) -> None:
        with np.errstate(all="ignore"):
            ufunc(into, span, out=into)

    return Reducer(kind.storage, apply, ufunc)


def closing_reducer(op: Op, kind: ElementType, world_size: int) -> Reducer:
    """Return the reduce of the last step: for MEAN it also `scale_after`s each span, while that is in the cache."""
    plain = reducer(op, kind)
    if op is not ReduceOp.MEAN:
        return plain

    def apply(into: Array, span: Array) -> None:
        plain.apply(into, span)
        scale_after(op, kind, into, world_size)

    return Reducer(plain.dtype, apply)


def opening_reducer(op: Op, kind: ElementType) -> Reducer:
    """Return the reduce of a span that was not touched before: for PREMUL_SUM it first `scale_before`s it, as above."""
    plain = reducer(op, kind)
    if not isinstance(op, PremulSum):
        return plain

    def apply(into: Array, span: Array) -> None:
        scale_before(op, kind, into)
        plain.apply(into, span)

    return Reducer(plain.dtype, apply)


# --- scaling ----------------------------------------------------------------------------------------------------------


def scale_before(op: Op, kind: ElementType, array: Array) -> None:
    """For PREMUL_SUM, multiply the contiguous `array` of `kind.storage` by this rank's factor, in place."""
    if not isinstance(op, PremulSum):
        return
    factor = _factor(op, kind)
    if kind.kind in "iu":
        array *= kind.storage.type(factor)
    else:
        # A NaN is replaced by the plain one, whose payload survives rounding to 16 bits.
        _scale_floats(np.multiply, kind, array, nan if isnan(factor) else factor)


def scale_after(op: Op, kind: ElementType, array: Array, world_size: int) -> None:
    """For MEAN, divide the contiguous `array` of `kind.storage` by `world_size`, in place.

    Integers are rounded towards zero.
    """
    if op is not ReduceOp.MEAN:
        return
    if kind.kind in "iu":
        _divide_integers(kind, array, world_size)
    else:
        _scale_floats(np.divide, kind, array, world_size)


def _scale_floats(ufunc: np.ufunc, kind: ElementType, array: Array, by: float) -> None:
    half = _HALVES.get(kind.name)
    if half is not None:
        float16.scale(half, ufunc, array, by)
        return
    with np.errstate(all="ignore"):
        # Complex as pairs of floats: a complex product would turn inf + 1j into inf + nanj.
        part = np.dtype(f"<f{kind.itemsize // 2}") if kind.kind == "c" else kind.storage
        parts = array.view(part)
        ufunc(parts, part.type(by), out=parts)


def _divide_integers(kind: ElementType, array: Array, by: int) -> None:
    # Through 64 bits, because `by` may not fit the type: a world of 200 and int8.
    for start in range(0, array.size, BLOCK):
        block = array[start : start + BLOCK]
        if kind.kind == "u":
            wide = block.astype(np.uint64)
        else:
            wide = block.astype(np.int64)
            wide += (wide < 0) * np.int64(by - 1)  # `//` rounds down; this makes it round up below zero
        wide //= wide.dtype.type(by)
        block[...] = wide
