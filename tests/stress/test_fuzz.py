"""A million strange inputs to everything that reads what others send."""

from __future__ import annotations

import resource
import time

from ringfort.config import MIB
from tests.helpers.fuzz import TARGETS, fuzz

COUNT = 1_000_000


def test_a_million_strange_inputs_give_typed_errors_only_and_take_no_memory() -> None:
    for target in TARGETS:
        fuzz(target, 0, 100)  # what is made once
    before, done = _peak(), 0
    for target, share in TARGETS.items():
        start, count = time.monotonic(), COUNT * share // 1000
        fuzz(target, 1_000_000_000, count)
        done += count
        print(f"{target.__name__}: {count} in {time.monotonic() - start:.0f} s")
    assert done == COUNT
    print(f"peak memory grew by {(_peak() - before) / MIB:.1f} MiB")
    assert _peak() - before < 32 * MIB


def _peak() -> int:
    """Bytes: the most that this process has held. (Linux counts in KiB.)"""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
