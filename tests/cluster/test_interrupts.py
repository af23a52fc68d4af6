"""Ctrl-C at random moments, in real processes. tests/stress has thousands; tests/unit/transport each place in turn."""

from __future__ import annotations

from tests.helpers.interrupts import KINDS, run


def test_an_interrupt_reaches_its_rank_and_ends_the_other() -> None:
    run(10 * len(KINDS), list(KINDS))
