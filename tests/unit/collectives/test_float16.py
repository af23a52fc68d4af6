"""16-bit floats: torch, ml_dtypes and NumPy must give the same bits, whatever goes in."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from ringfort.collectives import float16
from ringfort.collectives.float16 import BFLOAT16, FLOAT16, NUMPY, SMALL, Half, Means

Bits = npt.NDArray[np.uint16]

HALVES = [FLOAT16, BFLOAT16]
UFUNCS = [np.add, np.multiply, np.minimum, np.maximum]
EVERY = np.arange(2**16, dtype=np.uint16)
# Subnormals, the smallest normals, ones and their neighbours, ties, the largest, infinities and NaNs, of both types.
AWKWARD = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x0080, 0x3C00, 0x3C01, 0xBF81, 0x4B01, 0x7800, 0xF7FF, 0x7BFF]
AWKWARD += [0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0xFFFF, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7FC0, 0x7E00]


def means_of(library: str, monkeypatch: pytest.MonkeyPatch) -> Means:
    """The means that a program has which imported only `library`."""
    module = pytest.importorskip(library)
    for other in ("torch", "ml_dtypes"):
        monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.setitem(sys.modules, library, module)
    found = float16.best_means()
    assert (found is NUMPY) == (library == "numpy")
    return found


def storage(half: Half, bits: Bits) -> npt.NDArray[Any]:
    return bits.copy().view(np.float16 if half is FLOAT16 else np.uint16)


def reduced(half: Half, ufunc: np.ufunc, a: Bits, b: Bits, means: Means) -> Bits:
    into = storage(half, a)
    float16.reducer(half, ufunc, into, storage(half, b), means)
    return into.view(np.uint16)


def by_the_book(half: Half, ufunc: np.ufunc, a: Bits, b: Bits) -> Bits:
    """The ufunc in float32, rounded by a library, with the plain NaN."""
    dtype = np.float16 if half is FLOAT16 else import_module("ml_dtypes").bfloat16
    with np.errstate(all="ignore"):
        result = ufunc(a.view(dtype).astype(np.float32), b.view(dtype).astype(np.float32)).astype(dtype)
    bits = result.view(np.uint16).copy()
    zeros = (a & 0x7FFF == 0) & (b & 0x7FFF == 0)
    if ufunc in (np.minimum, np.maximum):  # -0 is the lesser, which a processor may or may not see
        bits[zeros] = (a | b if ufunc is np.minimum else a & b)[zeros]
    bits[np.isnan(result.astype(np.float32))] = half.nan
    return bits


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.name)
@pytest.mark.parametrize("ufunc", UFUNCS, ids=lambda ufunc: ufunc.__name__)
@pytest.mark.parametrize("library", ["numpy", "ml_dtypes", "torch"])
def test_every_means_gives_the_same_bits_for_every_number(
    half: Half, ufunc: np.ufunc, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [by_the_book(half, ufunc, EVERY, np.full_like(EVERY, other)) for other in AWKWARD]
    means = means_of(library, monkeypatch)
    for other, expected in zip(AWKWARD, wanted, strict=True):
        got = reduced(half, ufunc, EVERY, np.full_like(EVERY, other), means)
        np.testing.assert_array_equal(got, expected, f"{other:#06x}")


@pytest.mark.parametrize("library", ["ml_dtypes", "torch"])
@settings(max_examples=100)
@given(
    half=st.sampled_from(HALVES),
    ufunc=st.sampled_from(UFUNCS),
    size=st.sampled_from([0, 1, 7, 31, SMALL - 1, SMALL, float16.BLOCK + 3, 32768, 70_001]),
    seed=st.integers(0, 2**32),
    reach=st.sampled_from([0xFFFF, 0x77FF, 0x0FFF]),
)
def test_any_bits_of_any_length_reduce_alike(
    library: str, half: Half, ufunc: np.ufunc, size: int, seed: int, reach: int
) -> None:
    random = np.random.default_rng(seed)
    a, b = (random.integers(0, 2**16, size, np.uint16) & (reach | 0x8000) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        other = means_of(library, patch)
    np.testing.assert_array_equal(reduced(half, ufunc, a, b, other), reduced(half, ufunc, a, b, NUMPY))


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.name)
@pytest.mark.parametrize("library", ["ml_dtypes", "torch"])
@pytest.mark.parametrize("by", [2.0, 3.0, 7.0, 1000.0, 0.1, -1e6, 1e-30, 1e300, float("inf"), float("nan")])
def test_every_means_scales_alike(half: Half, library: str, by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    means = means_of(library, monkeypatch)
    with np.errstate(over="ignore"):
        factor = float(np.float32(by))
    for ufunc in (np.divide, np.multiply):
        ours, theirs = storage(half, EVERY), storage(half, EVERY)
        float16.scale(half, ufunc, ours, factor, NUMPY)
        float16.scale(half, ufunc, theirs, factor, means)
        np.testing.assert_array_equal(ours.view(np.uint16), theirs.view(np.uint16))


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.name)
def test_sums_of_ordinary_numbers_are_those_of_the_book(half: Half) -> None:
    random = np.random.default_rng(1)
    dtype = np.float16 if half is FLOAT16 else import_module("ml_dtypes").bfloat16
    a, b = ((random.normal(size=100_000) * 10.0 ** random.integers(-6, 4, 100_000)).astype(dtype) for _ in range(2))
    bits = a.view(np.uint16), b.view(np.uint16)
    np.testing.assert_array_equal(reduced(half, np.add, *bits, NUMPY), by_the_book(half, np.add, *bits))


def test_a_nan_comes_out_plain_however_it_went_in() -> None:
    for half in HALVES:
        for size in (1, 2 * SMALL):
            nans = np.full(size, 0xFFFF, np.uint16)
            assert (reduced(half, np.add, nans, nans, float16.best_means(size)) == half.nan).all()


def test_memory_that_is_read_only_is_reduced_from_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    means = means_of("torch", monkeypatch)
    into, span = np.zeros(SMALL, np.uint16), np.full(SMALL, 0x3F80, np.uint16)
    span.flags.writeable = False
    float16.reducer(BFLOAT16, np.add, into, span, means)
    assert (into == span).all()


def test_a_torch_that_does_not_work_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.delitem(sys.modules, "ml_dtypes", raising=False)
    assert float16.best_means() is NUMPY


def test_small_arrays_are_left_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    means_of("torch", monkeypatch)
    assert float16.best_means(SMALL - 1) is NUMPY
