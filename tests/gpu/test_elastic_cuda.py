"""Elastic runs of models on a GPU: they learn what a plain loop does, and survive a killed member."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.torch.zygote import Outcome, Zygote

PATIENCE = 90.0
"""Seconds for a scenario: CUDA alone takes a few to start."""
TOTAL = 40


@pytest.mark.parametrize("kind", ["plain", "fused", "deep"])
def test_members_on_a_gpu_compute_what_a_plain_loop_does_and_one_that_joins_continues(
    zygote: Zygote, kind: str
) -> None:
    [difference] = zygote.run("gpu.elastic_scenarios.joins", 1, kind, patience=PATIENCE)
    assert difference < 1e-5


def outcomes(zygote: Zygote, folder: Path, world_size: int, *arguments: Any) -> list[Outcome]:
    (folder / "home").mkdir(0o700, parents=True)
    arguments = (str(folder), TOTAL, *arguments)
    home = {"RINGFORT_HOME": str(folder / "home")}
    return zygote.outcomes("gpu.elastic_scenarios.churn", world_size, *arguments, patience=PATIENCE, **home)


def test_a_run_on_a_gpu_with_a_kill_and_a_join_is_that_of_one_without(zygote: Zygote, tmp_path: Path) -> None:
    quiet = outcomes(zygote, tmp_path / "quiet", 1, {}, {})
    stormy = outcomes(zygote, tmp_path / "stormy", 3, {"1": 20}, {"2": 12})
    assert [one.code for one in quiet + stormy] == [0, 0, -signal.SIGKILL, 0], "\n".join(
        one.words for one in quiet + stormy
    )
    alone, *ends = (one.value for one in quiet + stormy if one.value is not None)
    assert ends[0]["state"] == ends[1]["state"]
    for end in (alone, *ends):
        assert end["number"] == TOTAL
        assert end["seen"] == [TOTAL * 16 / 64]  # each sample once in each pass
        assert end["grown"] <= 1 << 20  # bytes on the GPU, in the second half
    for step, loss in ends[0]["losses"].items():
        assert loss == pytest.approx(alone["losses"][step], rel=0.02)  # of bfloat16
