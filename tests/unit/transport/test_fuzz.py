"""A few thousand of the inputs of tests/helpers/fuzz.py; tests/stress has the million."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from ringfort.config import MIB
from tests.helpers.fuzz import TARGETS, Target, fuzz

THOUSANDS = 8


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_strange_input_gives_typed_errors_only(target: Target) -> None:
    fuzz(target, 0, THOUSANDS * TARGETS[target])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_strange_input_takes_little_memory(target: Target) -> None:
    fuzz(target, 10_000_000, 5)  # what is made once
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for seed in range(40):
            tracemalloc.reset_peak()
            fuzz(target, 20_000_000 + seed, 1)
            # A sealed stream's two buffers of a record, 1 MiB each, are most of it.
            assert tracemalloc.get_traced_memory()[1] - before < 3 * MIB, f"seed {seed}"
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 3 * MIB
    finally:
        tracemalloc.stop()
