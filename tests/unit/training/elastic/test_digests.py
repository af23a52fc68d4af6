"""Digests: shares add up, damage is found, and infinities too."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ringfort.training.elastic import digests
from ringfort.training.elastic.digests import Inspection, digest_sample, digest_share, inspect_share


def buffers(float32: int, float64: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(float32)
    return {"float32": random.random(float32, np.float32), "float64": random.random(float64)}


@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (5, 3), (65536, 0), (65537, 1), (400_001, 100_000)])
def test_the_digests_of_shares_add_up_however_many_there_are(sizes: tuple[int, int]) -> None:
    sums = buffers(*sizes)
    whole = digest_share(sums, 0, 1)
    for size in (2, 3, 5, 7, 64):
        assert sum(digest_share(sums, me, size) for me in range(size)) % 2**64 == whole


@pytest.mark.parametrize("size", [1, 1024, 65536, 400_001])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_infinities_and_nans_are_found_by_whose_share_they_are_in(size: int, value: float) -> None:
    sums = {"float32": np.ones(size, np.float32), "sums": np.ones(2)}
    assert inspect_share(sums, 0, 1) == (digest_share(sums, 0, 1), True)
    sums["float32"][size // 2] = value
    found = [inspect_share(sums, me, 3) for me in range(3)]
    assert [digest for digest, _ in found] == [digest_share(sums, me, 3) for me in range(3)]
    assert [fine for _, fine in found].count(False) == 1


@pytest.mark.parametrize("value", [1.0, np.inf])
def test_several_threads_inspect_what_one_would(value: float) -> None:
    """Also if one of them is interrupted in the middle."""
    sums = buffers(3_000_000, 500_000)
    sums["float32"][123_456] = value
    inspect, left = digests._inspected, [1]

    def interrupted(*arguments: Any) -> Any:
        if threading.current_thread() is threads[1] and left:
            left.pop()
            raise MemoryError
        return inspect(*arguments)

    for size in (1, 3):
        inspection = Inspection(sums, 0, size)
        parts = [(kind, begin) for kind in sums for begin in range(0, sums[kind].size, 100_000)][::-1]

        def help_out(inspection: Inspection, parts: list[tuple[str, int]]) -> None:
            for _ in range(7):
                with suppress(MemoryError):
                    inspection.complete(sums, *parts.pop())

        threads = [threading.Thread(target=help_out, args=(inspection, parts)) for _ in range(5)]
        with patch.object(digests, "_inspected", interrupted):
            for thread in threads:
                thread.start()
            assert inspection.finish(sums) == inspect_share(sums, 0, size)
            for thread in threads:
                thread.join()


def test_a_sum_that_overflows_is_no_infinity() -> None:
    assert inspect_share({"float32": np.full(1000, 3e38, np.float32)}, 0, 1)[1]


def test_a_digest_never_changes() -> None:
    sums = {"float32": np.arange(100_000, dtype=np.float32), "float64": np.arange(1000) / 1024}
    assert digest_share(sums, 0, 1) == 9582774670367756008


@settings(max_examples=200)
@given(st.integers(0, 70_001 * 4 - 1), st.integers(0, 7))
def test_any_flipped_bit_changes_the_digest(byte: int, bit: int) -> None:
    sums = buffers(70_001)
    before = digest_share(sums, 0, 1)
    sums["float32"].view(np.uint8)[byte] ^= 1 << bit
    assert digest_share(sums, 0, 1) != before


def test_flips_that_cancel_in_a_plain_sum_are_found() -> None:
    sums = buffers(1000)
    before = digest_share(sums, 0, 1)
    words = sums["float32"]
    for first, second in ((1, 3), (0, 999), (2, 3), (500, 502)):
        words[first], words[second] = words[second], words[first]
        assert digest_share(sums, 0, 1) != before
        words[first], words[second] = words[second], words[first]
        words[first] *= -1
        words[second] *= -1
        assert digest_share(sums, 0, 1) != before
        words[first] *= -1
        words[second] *= -1
    assert digest_share(sums, 0, 1) == before


@pytest.mark.parametrize("size", [512, 4096, 16384, 65536])
def test_swapped_pieces_change_the_digest(size: int) -> None:
    sums = buffers(70_000)
    before, data = digest_share(sums, 0, 1), sums["float32"].view(np.uint8)
    for first, second in ((0, 1), (1, 2), (0, 3)):
        one, other = (data[index * size : (index + 1) * size] for index in (first, second))
        one[:], other[:] = other.copy(), one.copy()
        assert digest_share(sums, 0, 1) != before
        one[:], other[:] = other.copy(), one.copy()
    assert digest_share(sums, 0, 1) == before


@pytest.mark.parametrize("mib", [0.1, 0.25, 1, 5.1])
def test_each_byte_is_in_a_sample_within_16_turns_and_small_sums_in_each(mib: float) -> None:
    sums = {"float32": np.zeros(int(mib * 2**18), np.float32), "sums": np.zeros(2)}
    turns = range(7, 7 + 16) if mib > 0.25 else range(1)
    before = [digest_sample(sums, turn) for turn in turns]
    for kind, place in (("float32", 0), ("float32", -1), ("float32", sums["float32"].size // 2), ("sums", 1)):
        sums[kind][place] = 1
        assert before != [digest_sample(sums, turn) for turn in turns]
        sums[kind][place] = 0
    assert before == [digest_sample(sums, turn) for turn in turns]


def test_swapped_blocks_change_the_digest() -> None:
    sums = buffers(65536 * 2)
    before = digest_share(sums, 0, 1)
    sums["float32"] = np.roll(sums["float32"], 65536)
    assert digest_share(sums, 0, 1) != before
