"""Elastic torch runs with local steps, by real processes: members die, join and return, as with exact steps."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.torch.test_elastic_torch import values
from tests.torch.zygote import Outcome, Zygote

pytest.importorskip("torch")

TOTAL = 40


def outcomes(zygote: Zygote, home: Path, scenario: str, world_size: int, *arguments: object) -> list[Outcome]:
    """Return what became of each process. They are a cluster of their own."""
    (home / "home").mkdir(0o700, exist_ok=True)
    variables = {"RINGFORT_HOME": str(home / "home")}
    return zygote.outcomes(f"torch.round_scenarios.{scenario}", world_size, *arguments, patience=90.0, **variables)


@pytest.mark.parametrize("codec", ["int8", pytest.param("sparse", marks=pytest.mark.stress)])
def test_rounds_with_kills_and_joins_learn_each_sample_once_and_agree_to_the_bit(
    zygote: Zygote, tmp_path: Path, codec: str
) -> None:
    quiet, stormy = tmp_path / "quiet", tmp_path / "stormy"
    quiet.mkdir()
    stormy.mkdir()
    [alone] = values(outcomes(zygote, quiet, "churn", 1, str(quiet), TOTAL, codec, {}, {}), [0])
    deaths, births = {"1": 20}, {"2": 10}
    found = outcomes(zygote, stormy, "churn", 3, str(stormy), TOTAL, codec, deaths, births)
    ends = values(found, [0, -signal.SIGKILL, 0])
    assert ends[0]["state"] == ends[1]["state"]
    assert ends[0]["weights"] == ends[1]["weights"]
    for end in (alone, *ends):
        assert end["number"] == TOTAL
        assert end["seen"] == [TOTAL * 16 / 64]  # each sample once in each pass
        assert end["rates"] == {step: alone["rates"][step] for step in end["rates"]}
    assert alone["turns"] == TOTAL * 4
    assert all(end["turns"] < TOTAL * 4 for end in ends)  # they have shared the work
    first, last = alone["losses"]["1"], alone["losses"][str(TOTAL)]
    assert last < 0.9 * first
    assert ends[0]["losses"][str(TOTAL)] < 0.95 * first


def test_passes_are_counted_in_samples_however_many_rounds_they_take(zygote: Zygote, tmp_path: Path) -> None:
    [found] = values(outcomes(zygote, tmp_path, "passes", 1), [0])
    usual = {"epochs": [16, 16], "rate": 0.01 * 0.25}
    # Rounds of 3 and of 5 steps: the last one of a pass of 16 steps is short.
    assert found["local"] == {**usual, "seen": [128], "length": 32, "rounds": 12}
    assert found["auto"] == {**usual, "seen": [64, 64, 0], "length": 16, "rounds": 8}


def test_one_member_with_the_plain_mean_trains_as_without_a_run(zygote: Zygote, tmp_path: Path) -> None:
    [difference] = values(outcomes(zygote, tmp_path, "alone", 1), [0])
    assert difference < 1e-6


def test_global_weights_are_shown_and_mistakes_are_told(zygote: Zygote, tmp_path: Path) -> None:
    [found] = values(outcomes(zygote, tmp_path, "shown", 1), [0])
    assert found["moved"] == [False, True, True, True] * 3
    assert "call run.step() instead" in found["optimizer"]
    assert "float64" in found["double"]
    assert "with local steps" in found["double"]
    assert "every_step, local or auto" in found["sync"]
    for name in ("every", "codec", "outer_rate", "outer_momentum"):
        assert f"{name}=" in found[name], found[name]
    assert "must be the batch (4)" in found["microbatch"]
    assert 'needs sync="every_step"' in found["frozen"]
    assert "NonFiniteStepError" in found["nan"]


DIFFERS = {
    "codec": ("codec int4", "codec int8"),
    "every_step": ("sync is missing here and local, every 4 steps",),
    "clip_norm": ("clip_norm is 0.5 here and None there",),
    "every": ("sync is local, every 5 steps", "local, every 4 steps"),
    "outer_rate": ("outer rate 0.5", "outer rate 1.0"),
    "outer_momentum": ("momentum 0.5", "momentum 0.0"),
    "auto": ("sync is auto", "local, every 4 steps"),
    "scheduler_per": ("scheduler_per is pass here and step there",),
}
"""Words of what a member is told, by what it has otherwise than the run."""


@pytest.mark.parametrize(
    "names", [list(DIFFERS)[:3], pytest.param(list(DIFFERS)[3:], marks=pytest.mark.stress)], ids=["few", "more"]
)
def test_a_member_with_other_settings_is_told_what_differs(zygote: Zygote, tmp_path: Path, names: list[str]) -> None:
    fine, words = values(outcomes(zygote, tmp_path, "differ", 2, str(tmp_path), names), [0, 0])
    assert fine == "nothing"
    for name in names:
        for word in DIFFERS[name]:
            assert word in words[name], (name, words)
