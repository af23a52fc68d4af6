"""Reductions and scales, against NumPy, ml_dtypes and exact integers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from ringfort.collectives import reduction
from ringfort.collectives.ops import Op, PremulSum, ReduceOp
from ringfort.collectives.reduction import ELEMENT_TYPES, ElementType, by_code, element_type, element_type_named
from ringfort.errors import InvalidArgumentError, UnsupportedArrayError, UnsupportedOpError

BFLOAT16 = element_type_named("bfloat16")
INTEGERS = [kind for kind in ELEMENT_TYPES if kind.kind in "iu"]
FLOATS = [kind for kind in ELEMENT_TYPES if kind.kind == "f"]
COMPLEX = [kind for kind in ELEMENT_TYPES if kind.kind == "c"]
FOLDED_OPS: dict[Op, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.premul_sum(3): np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def ident(value: object) -> str:
    if isinstance(value, ElementType):
        return value.name
    return reduction.describe(value) if isinstance(value, (ReduceOp, PremulSum)) else str(value)


def has_meaning(op: Op, kind: ElementType) -> bool:
    name = reduction.describe(op)
    if kind.kind in "fc" and name in ("BAND", "BOR", "BXOR"):
        return False
    if kind.kind == "c" and name in ("MIN", "MAX"):
        return False
    return not (kind.kind == "b" and name in ("MEAN", "PREMUL_SUM"))


PAIRS = [(op, kind) for op in FOLDED_OPS for kind in ELEMENT_TYPES]
MEANINGFUL = [pair for pair in PAIRS if has_meaning(*pair)]


def as_floats(bits: npt.NDArray[Any], kind: ElementType) -> npt.NDArray[Any]:
    """16-bit floats as the library that knows them sees them."""
    return bits.view(ml_dtypes.bfloat16 if kind is BFLOAT16 else np.float16)


def same(ours: npt.NDArray[Any], expected: npt.NDArray[Any]) -> bool:
    """Equal bit for bit, except that any NaN equals any other."""
    ours32, expected32 = ours.astype(np.float32), expected.astype(np.float32)
    nans = np.isnan(expected32)
    same_numbers = np.array_equal(ours32[~nans].view(np.uint32), expected32[~nans].view(np.uint32))
    return np.array_equal(np.isnan(ours32), nans) and same_numbers


# --- element types ----------------------------------------------------------------------------------------------------


def test_the_wire_codes_of_element_types_never_change() -> None:
    assert {kind.name: kind.code for kind in ELEMENT_TYPES} == {
        "bool": 1,
        "int8": 2,
        "int16": 3,
        "int32": 4,
        "int64": 5,
        "uint8": 6,
        "uint16": 7,
        "uint32": 8,
        "uint64": 9,
        "float16": 10,
        "bfloat16": 11,
        "float32": 12,
        "float64": 13,
        "complex64": 14,
        "complex128": 15,
    }


@pytest.mark.parametrize("kind", ELEMENT_TYPES, ids=ident)
def test_an_element_type_is_found_by_dtype_name_and_code(kind: ElementType) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16) if kind is BFLOAT16 else np.dtype(kind.name)
    assert element_type(dtype) is kind
    assert element_type_named(kind.name) is kind
    assert by_code(kind.code) is kind
    assert kind.itemsize == kind.storage.itemsize == dtype.itemsize


def test_the_c_names_of_one_layout_are_one_element_type() -> None:
    assert element_type(np.dtype(np.longlong)) is element_type(np.dtype(np.int64))
    assert element_type(np.dtype(np.ulonglong)) is element_type(np.dtype(np.uint64))


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(">f4"),
        np.dtype(">i8"),
        np.dtype(object),
        np.dtype("U3"),
        np.dtype("S3"),
        np.dtype("V2"),
        np.dtype("M8[s]"),
        np.dtype([("a", "f4")]),
        np.dtype(("f4", (2,))),
        np.dtype(ml_dtypes.float8_e4m3fn),
    ],
    ids=str,
)
def test_a_dtype_that_cannot_be_reduced_is_refused_by_the_arguments_name(dtype: np.dtype[Any]) -> None:
    with pytest.raises(UnsupportedArrayError, match=r"^x=") as caught:
        element_type(dtype, name="x")
    assert caught.value.value == dtype


def test_an_unknown_name_or_code_is_refused() -> None:
    with pytest.raises(UnsupportedArrayError, match="dtype='float8'"):
        element_type_named("float8")
    with pytest.raises(InvalidArgumentError, match="code=16"):
        by_code(16)


# --- which ops there are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "kind"), [pair for pair in PAIRS if not has_meaning(*pair)], ids=ident)
def test_an_op_without_meaning_for_the_element_type_is_refused(op: Op, kind: ElementType) -> None:
    with pytest.raises(UnsupportedOpError, match=f"{reduction.describe(op)}.*{kind.name}"):
        reduction.reducer(op, kind)


def test_a_premultiplied_sum_without_its_factor_says_how_to_give_one() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^op=.*ReduceOp\.premul_sum\(factor\)"):
        reduction.reducer(ReduceOp.PREMUL_SUM, element_type_named("float32"))


@pytest.mark.parametrize("op", ["sum", None, 1, np.add])
def test_what_is_no_op_is_refused(op: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^op="):
        reduction.reducer(op, element_type_named("float32"))


@pytest.mark.parametrize(
    ("factor", "name"),
    [
        ("2", "float32"),
        (None, "float32"),
        (True, "int32"),
        (1j, "complex64"),
        (10**400, "float64"),
        (0.5, "int32"),
        (float("nan"), "int64"),
        (float("inf"), "int64"),
        (128, "int8"),
        (-1, "uint8"),
        (2**63, "int64"),
    ],
)
def test_a_factor_that_cannot_be_used_is_refused_before_anything_moves(factor: Any, name: str) -> None:
    op, kind = ReduceOp.premul_sum(factor), element_type_named(name)
    with pytest.raises(InvalidArgumentError, match=r"^factor="):
        reduction.reducer(op, kind)
    with pytest.raises(InvalidArgumentError, match=r"^factor="):
        reduction.scale_before(op, kind, np.ones(1, kind.storage))


def test_ops_have_the_codes_and_names_of_reduce_op_whatever_their_factor() -> None:
    for op in ReduceOp:
        asked = ReduceOp.premul_sum(0.5) if op is ReduceOp.PREMUL_SUM else op
        assert reduction.code_of(asked) == op.value
        assert reduction.describe(asked) == op.name
        assert reduction.needs_scale_before(asked) == (op is ReduceOp.PREMUL_SUM)


def test_the_same_reduce_is_handed_out_each_time() -> None:
    kind = element_type_named("float32")
    assert reduction.reducer(ReduceOp.premul_sum(2), kind) is reduction.reducer(ReduceOp.premul_sum(3), kind)


# --- reducing
# ----------------------------------------------------------------------------------------------------------


def check_fold(op: Op, kind: ElementType, into: npt.NDArray[Any], span: npt.NDArray[Any]) -> None:
    before = span.tobytes()
    chosen = reduction.reducer(op, kind)
    assert chosen.dtype == kind.storage
    if kind is BFLOAT16:
        expected = with_ml_dtypes(FOLDED_OPS[op], into, span)
        chosen.apply(into, span)
        np.testing.assert_array_equal(as_floats(into, kind).astype(np.float32), expected.astype(np.float32))
    else:
        expected = into.copy()
        with np.errstate(all="ignore"):
            # In place, as NumPy rounds a product of two complex numbers otherwise where it fills a new array.
            FOLDED_OPS[op](expected, span, out=expected)
        chosen.apply(into, span)
        np.testing.assert_array_equal(into, expected)
    assert span.tobytes() == before


@pytest.mark.parametrize(("op", "kind"), MEANINGFUL, ids=ident)
def test_a_reduce_does_to_any_bytes_what_numpy_does(op: Op, kind: ElementType) -> None:
    random = np.random.default_rng(kind.code)
    size = 100 * kind.itemsize
    into, span = (random.integers(0, 2 if kind.kind == "b" else 256, size, np.uint8) for _ in range(2))
    check_fold(op, kind, into.view(kind.storage), span.view(kind.storage))


@given(st.sampled_from(MEANINGFUL), st.integers(0, 40), st.data())
@settings(max_examples=300)
def test_a_reduce_does_to_awkward_values_what_numpy_does(
    pair: tuple[Op, ElementType], length: int, data: st.DataObject
) -> None:
    op, kind = pair
    into, span = (data.draw(hnp.arrays(kind.storage, length)) for _ in range(2))
    check_fold(op, kind, into, span)


def with_ml_dtypes(ufunc: Callable[..., Any], *bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The ufunc in float32 on bfloat16 bits, rounded by ml_dtypes, whose rounding is not ours."""
    with np.errstate(all="ignore"):
        return ufunc(*(array.view(ml_dtypes.bfloat16).astype(np.float32) for array in bits)).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("kind", [BFLOAT16, element_type_named("float16")], ids=ident)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX], ids=ident)
@pytest.mark.parametrize("other", [0x0001, 0x8001, 0x3F81, 0x3C01, 0x7BFF, 0x7F7F, 0x7F80, 0xFC00, 0x7FFF, 0xFF81])
def test_every_16_bit_float_is_computed_in_float32_and_rounded_once(op: Op, kind: ElementType, other: int) -> None:
    into = np.arange(2**16, dtype=np.uint16)
    span = np.full(2**16, other, np.uint16)
    floats = as_floats(into, kind)
    with np.errstate(all="ignore"):
        wide = FOLDED_OPS[op](floats.astype(np.float32), as_floats(span, kind).astype(np.float32))
        expected = wide.astype(floats.dtype)
    storage = kind.storage
    reduction.reducer(op, kind).apply(into.view(storage), span.view(storage))
    assert same(as_floats(into, kind), expected)


def test_a_bfloat16_sum_rounds_to_nearest_even_and_overflows_to_infinity() -> None:
    floats = np.array([256.0, 258.0, 3.3e38, np.inf, np.inf, np.nan, -0.0], ml_dtypes.bfloat16)
    others = np.array([1.0, 1.0, 3.3e38, 1.0, -np.inf, 1.0, -0.0], ml_dtypes.bfloat16)
    into = floats.view(np.uint16)
    reduction.reducer(ReduceOp.SUM, BFLOAT16).apply(into, others.view(np.uint16))
    np.testing.assert_array_equal(
        into.view(ml_dtypes.bfloat16).astype(np.float64), [256.0, 260.0, np.inf, np.inf, np.nan, np.nan, 0.0]
    )
    assert np.signbit(floats[-1].astype(np.float32))


@pytest.mark.parametrize("kind", [*FLOATS, *COMPLEX], ids=ident)
def test_overflow_and_not_a_number_are_silent_even_where_numpy_was_told_to_raise(kind: ElementType) -> None:
    dtype = ml_dtypes.bfloat16 if kind is BFLOAT16 else kind.storage
    largest = float(ml_dtypes.finfo(dtype).max)
    values = np.array([largest, np.inf, 1e-7], np.float64).astype(dtype).view(kind.storage)
    others = np.array([largest, -np.inf, 1e-7], np.float64).astype(dtype).view(kind.storage)
    with np.errstate(all="raise"):
        reduction.reducer(ReduceOp.SUM, kind).apply(values.copy(), others)
        reduction.reducer(ReduceOp.PRODUCT, kind).apply(values.copy(), others)
        reduction.scale_before(ReduceOp.premul_sum(1e300), kind, values.copy())
        reduction.scale_after(ReduceOp.MEAN, kind, values.copy(), 3)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=ident)
@pytest.mark.parametrize("kind", [kind for kind in FLOATS if kind is not BFLOAT16], ids=ident)
def test_the_least_and_the_greatest_of_anything_and_nan_is_nan(op: Op, kind: ElementType) -> None:
    into = np.array([np.nan, 1.0, np.nan], kind.storage)
    reduction.reducer(op, kind).apply(into, np.array([1.0, np.nan, -np.inf], kind.storage))
    assert np.isnan(into).all()


def test_integers_wrap_silently() -> None:
    into = np.array([127, -128], np.int8)
    reduction.reducer(ReduceOp.SUM, element_type_named("int8")).apply(into, np.array([1, -1], np.int8))
    assert into.tolist() == [-128, 127]


def test_a_long_bfloat16_reduce_is_whole_across_its_blocks() -> None:
    length = 2 * reduction.BLOCK + 5
    into = np.linspace(-3, 3, length).astype(ml_dtypes.bfloat16)
    span = np.linspace(7, -2, length).astype(ml_dtypes.bfloat16)
    expected = (into.astype(np.float32) + span.astype(np.float32)).astype(ml_dtypes.bfloat16)
    reduction.reducer(ReduceOp.SUM, BFLOAT16).apply(into.view(np.uint16), span.view(np.uint16))
    assert same(into, expected)


def test_reduces_in_several_threads_do_not_mix() -> None:
    reducer = reduction.reducer(ReduceOp.SUM, BFLOAT16)
    one = np.ones(3 * reduction.BLOCK, ml_dtypes.bfloat16).view(np.uint16)

    def work(start: int) -> bool:
        into = np.full(one.size, start, ml_dtypes.bfloat16)
        for _ in range(5):
            reducer.apply(into.view(np.uint16), one)
        return bool((into == start + 5).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.parametrize(("op", "kind"), MEANINGFUL, ids=ident)
def test_the_first_and_the_last_reduce_scale_as_a_pass_of_its_own_does(op: Op, kind: ElementType) -> None:
    random = np.random.default_rng(kind.code)
    into, span = (random.integers(0, 2, 50 * kind.itemsize, np.uint8).view(kind.storage) for _ in range(2))
    apart, opened, closed = into.copy(), into.copy(), into.copy()
    reduction.scale_before(op, kind, apart)
    reduction.reducer(op, kind).apply(apart, span)
    reduction.opening_reducer(op, kind).apply(opened, span)
    assert opened.tobytes() == apart.tobytes()
    reduction.reducer(op, kind).apply(into, span)
    reduction.scale_after(op, kind, into, 3)
    reduction.closing_reducer(op, kind, 3).apply(closed, span)
    assert closed.tobytes() == into.tobytes()


# --- scaling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INTEGERS, ids=ident)
def test_the_mean_of_integers_is_exact_and_rounds_towards_zero(kind: ElementType) -> None:
    limits = np.iinfo(kind.storage)

    @given(st.lists(st.integers(int(limits.min), int(limits.max)), max_size=20), st.integers(1, 1000))
    def check(values: list[int], world_size: int) -> None:
        values += [int(limits.min), int(limits.max), 0]
        array = np.array(values, kind.storage)
        reduction.scale_after(ReduceOp.MEAN, kind, array, world_size)
        assert array.tolist() == [int(Fraction(value, world_size)) for value in values]  # int() cuts towards zero

    check()


def test_the_mean_of_a_long_integer_array_is_whole_across_its_blocks() -> None:
    kind = element_type_named("int32")
    array = np.arange(-reduction.BLOCK, reduction.BLOCK + 3, dtype=np.int32)
    expected = [int(Fraction(value, 7)) for value in array.tolist()]
    reduction.scale_after(ReduceOp.MEAN, kind, array, 7)
    assert array.tolist() == expected


@pytest.mark.parametrize("name", ["float32", "float64"])
@given(st.data(), st.integers(1, 1000))
def test_the_mean_of_floats_is_their_quotient(name: str, data: st.DataObject, world_size: int) -> None:
    kind = element_type_named(name)
    array = data.draw(hnp.arrays(kind.storage, st.integers(0, 20)))
    expected = array / kind.storage.type(world_size)
    reduction.scale_after(ReduceOp.MEAN, kind, array, world_size)
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("kind", [BFLOAT16, element_type_named("float16")], ids=ident)
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 1000])
def test_every_16_bit_float_is_divided_in_float32_and_rounded_once(kind: ElementType, world_size: int) -> None:
    array = np.arange(2**16, dtype=np.uint16)
    floats = as_floats(array, kind)
    with np.errstate(all="ignore"):
        expected = (floats.astype(np.float32) / np.float32(world_size)).astype(floats.dtype)
    reduction.scale_after(ReduceOp.MEAN, kind, array.view(kind.storage), world_size)
    assert same(as_floats(array, kind), expected)


@pytest.mark.parametrize("kind", [BFLOAT16, element_type_named("float16")], ids=ident)
@pytest.mark.parametrize("factor", [0.1, -3.0, 1e6, 1e-30, 1e300, float("inf"), float("nan"), 2])
def test_every_16_bit_float_is_multiplied_in_float32_and_rounded_once(kind: ElementType, factor: float) -> None:
    array = np.arange(2**16, dtype=np.uint16)
    floats = as_floats(array, kind)
    with np.errstate(all="ignore"):
        expected = (floats.astype(np.float32) * np.float32(factor)).astype(floats.dtype)
    reduction.scale_before(ReduceOp.premul_sum(factor), kind, array.view(kind.storage))
    assert same(as_floats(array, kind), expected)


def test_a_nan_factor_with_every_payload_bit_set_leaves_nan_and_not_zero() -> None:
    factor = float(np.array([0x7FFFFFFFFFFFFFFF], np.uint64).view(np.float64)[0])
    array = np.ones(3, ml_dtypes.bfloat16)
    reduction.scale_before(ReduceOp.premul_sum(factor), BFLOAT16, array.view(np.uint16))
    assert np.isnan(array.astype(np.float32)).all()


@pytest.mark.parametrize("kind", COMPLEX, ids=ident)
def test_complex_numbers_are_scaled_part_by_part(kind: ElementType) -> None:
    values = [complex(3, -6), complex(np.inf, 1), complex(0, -np.inf)]
    mean, scaled = np.array(values, kind.storage), np.array(values, kind.storage)
    reduction.scale_after(ReduceOp.MEAN, kind, mean, 3)
    reduction.scale_before(ReduceOp.premul_sum(2), kind, scaled)
    # As pairs: an infinity in one part must not make the other NaN.
    assert mean.view(mean.real.dtype).tolist() == pytest.approx([1, -2, np.inf, 1 / 3, 0, -np.inf])
    assert scaled.view(scaled.real.dtype).tolist() == [6, -12, np.inf, 2, 0, -np.inf]


def test_an_integer_is_multiplied_exactly() -> None:
    array = np.array([2**62 - 1, -5], np.int64)
    reduction.scale_before(ReduceOp.premul_sum(2.0), element_type_named("int64"), array)
    assert array.tolist() == [2**63 - 2, -10]


@pytest.mark.parametrize("factor", [np.float32(0.5), np.float64(0.5), np.float16(0.5)])
def test_a_factor_may_be_a_numpy_number(factor: Any) -> None:
    array = np.array([2.0, 3.0], np.float32)
    reduction.scale_before(ReduceOp.premul_sum(factor), element_type_named("float32"), array)
    assert array.tolist() == [1.0, 1.5]


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX], ids=ident)
def test_ops_without_a_scale_leave_the_array_as_it_is(op: Op) -> None:
    array = np.array([2.0, 3.0], np.float32)
    reduction.scale_before(op, element_type_named("float32"), array)
    reduction.scale_after(op, element_type_named("float32"), array, 4)
    assert array.tolist() == [2.0, 3.0]
