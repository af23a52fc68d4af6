"""The long form of tests/cluster/test_interrupts.py."""

from __future__ import annotations

import pytest

from tests.helpers.interrupts import KINDS, run


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_interrupts_are_neither_swallowed_nor_hang(kind: str) -> None:
    for seed in range(4):
        found = run(250, [kind], seed)
        worst = max(one["error_at"] - one["fired_at"] for one in found)
        print(f"{kind}: the other rank learned of it after {worst:.3f} s at the latest")
