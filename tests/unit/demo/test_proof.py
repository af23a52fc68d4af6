"""The demo's verdict: it must be able to say FAIL."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from ringfort.demo.proof import Outcome, Training, relative_differences
from ringfort.demo.screen import Show, curve_steps
from ringfort.demo.settings import BATCH, RANKS, TOLERANCE, Settings
from ringfort.errors import InvalidArgumentError


def training(losses: list[float], digests: list[str]) -> Training:
    return Training(losses=losses, validation=[4.6, 2.0], digests=digests, seconds=1.0, sample="text")


def outcome(ours: list[float], theirs: list[float], digests: list[str]) -> Outcome:
    return Outcome(Settings(ranks=3, steps=len(theirs)), training(ours, digests), training(theirs, digests[:1]))


SAME = ["a" * 64] * 3


def test_equal_weights_and_curves_pass() -> None:
    assert outcome([4.0, 2.0], [4.0, 2.0 * (1 + TOLERANCE / 2)], SAME).passed


@pytest.mark.parametrize(
    ("ours", "digests"),
    [
        ([4.0, 2.0 * (1 + 2 * TOLERANCE)], SAME),
        ([4.0], SAME),
        ([math.nan, 2.0], SAME),
        ([4.0, 2.0], ["a", "a", "b"]),
        ([4.0, 2.0], ["a", "a"]),
    ],
    ids=["another loss", "a short curve", "no number", "other weights", "a missing rank"],
)
def test_any_difference_fails_and_is_shown(ours: list[float], digests: list[str]) -> None:
    result = outcome(ours, [4.0, 2.0], digests)
    assert not result.passed
    screen = io.StringIO()
    Show(Console(file=screen, width=100), result.settings, live=False).proof(result)
    assert "FAIL" in screen.getvalue()
    assert json.loads(json.dumps(result.to_dict()))["passed"] is False


def test_a_pass_is_shown_as_one() -> None:
    result = outcome([4.0, 2.0], [4.0, 2.0], SAME)
    screen = io.StringIO()
    Show(Console(file=screen, width=100), result.settings, live=False).proof(result)
    assert screen.getvalue().count("PASS") == 2
    assert "FAIL" not in screen.getvalue()


def test_relative_differences_are_relative_and_never_nan() -> None:
    assert relative_differences([2.0, 0.0, 1.0, math.nan], [1.0, 0.0, 0.0, 1.0]) == [1.0, 0.0, math.inf, math.inf]


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 1200])
def test_the_curve_is_shown_from_its_first_step_to_its_last(steps: int) -> None:
    shown = curve_steps(steps)
    assert shown[0] == 0
    assert shown[-1] == steps - 1
    assert len(shown) == len(set(shown)) <= 6


@pytest.mark.parametrize(("name", "value"), [("ranks", 0), ("ranks", 257), ("steps", 0), ("seed", -1)], ids=str)
def test_settings_that_cannot_work_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name}={value}"):
        Settings(**{name: value})


def test_a_framework_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="numpy or torch"):
        Settings(framework="jax")  # pyright: ignore[reportArgumentType]


def test_the_shares_of_the_default_run_are_uneven() -> None:
    assert all(batch % RANKS for batch in BATCH.values())
