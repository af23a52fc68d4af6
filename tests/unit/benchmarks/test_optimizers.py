"""`python -m benchmarks.optimizers`, a few steps of it."""

from __future__ import annotations

import pytest

from benchmarks.optimizers import Case, train

pytest.importorskip("torch")


def test_a_run_with_a_codec_learns_something() -> None:
    first, later = (train(Case("tiny", "adam", "constant", "int4", 0, steps)) for steps in (1, 4))
    assert 0 < later < first
