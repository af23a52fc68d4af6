"""The demo's verdict: it must be able to say FAIL."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ringfort.cli.app import app
from ringfort.cli.outcome import EXIT_FAILED
from ringfort.demo.proof import Outcome, Training, relative_differences
from ringfort.demo.screen import Show, curve_steps
from ringfort.demo.settings import BATCH, FEWEST_STEPS, PASSES, RANKS, STEPS, TOLERANCE, Framework, Settings
from ringfort.demo.story import Fault
from ringfort.errors import InvalidArgumentError

LONG = FEWEST_STEPS
"""Steps from which on a peer is killed."""
BACK = Fault(peer=1, step=13, resumed_after=0.5, back_at=20, back_after=3.0)


def outcome(steps: int = 2, reference: list[float] | None = None, **changes: Any) -> Outcome:
    settings = Settings(ranks=3, steps=steps)
    right: dict[str, Any] = {
        "losses": [4.0] * steps,
        "validation": [4.6, 2.0],
        "digests": ["a" * 64] * 3,
        "seconds": 1.0,
        "sample": "text",
        "applied": [[1, 1]] * 3,
        "whole_passes": [settings.passes] * 3,
        "faults": [] if settings.kill_at is None else [BACK],
    }
    return Outcome(settings, Training(**right | changes), Training(**right | {"losses": reference or right["losses"]}))


def shown(result: Outcome) -> str:
    screen = io.StringIO()
    Show(Console(file=screen, width=100), result.settings, live=False).proof(result)
    return screen.getvalue()


@pytest.mark.parametrize(("steps", "claims"), [(2, 4), (LONG, 5)])
def test_a_run_in_which_all_claims_hold_passes(steps: int, claims: int) -> None:
    result = outcome(steps, reference=[4.0 * (1 + TOLERANCE / 2)] * steps)
    assert result.passed
    assert shown(result).count("PASS") == claims
    assert "FAIL" not in shown(result)


@pytest.mark.parametrize(
    "changes",
    [
        {"losses": [4.0] * (LONG - 1) + [4.0 * (1 + 2 * TOLERANCE)]},
        {"losses": [4.0 * 1.001] * LONG},
        {"losses": [4.0]},
        {"losses": [4.0] * (LONG - 1) + [math.nan]},
        {"digests": ["a", "a", "b"]},
        {"digests": ["a", "a"]},
        {"applied": [[1, 1], [1, 1], [0, 1]]},
        {"applied": [[1, 1], [1, 2], [1, 1]]},
        {"applied": [[1, 1]] * 2},
        {"whole_passes": [3, 3, 2]},
        {"faults": []},
        {"faults": [Fault(peer=1, step=13)]},
    ],
    ids=[
        "another loss",
        "a loss that is off by a thousandth",
        "a short curve",
        "no number",
        "other weights",
        "a missing peer",
        "a lost step",
        "a step applied twice",
        "a peer without counters",
        "a pass with a wrong sample",
        "nobody was killed",
        "not back",
    ],
)
def test_whatever_does_not_hold_fails_and_is_shown(changes: dict[str, Any]) -> None:
    result = outcome(LONG, **changes)
    assert not result.passed
    assert "FAIL" in shown(result)
    assert json.loads(json.dumps(result.to_dict()))["passed"] is False


@pytest.mark.parametrize(("digests", "code"), [(["a", "a", "a"], 0), (["a", "a", "b"], EXIT_FAILED)])
def test_the_command_fails_with_the_proof(monkeypatch: pytest.MonkeyPatch, digests: list[str], code: int) -> None:
    monkeypatch.setattr("ringfort.demo.run.run_demo", lambda *_, **__: outcome(LONG, digests=digests))
    assert CliRunner().invoke(app, ["demo", "--framework", "numpy", "--json"]).exit_code == code


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


@pytest.mark.parametrize("framework", BATCH)
def test_the_default_run_has_uneven_shares_a_short_step_and_a_fault(framework: Framework) -> None:
    settings = Settings(framework=framework, steps=STEPS[framework])
    assert -(-settings.batch // settings.microbatch) % RANKS
    assert settings.samples % settings.batch
    assert settings.passes == PASSES
    assert settings.kill_at
    assert settings.nodes == "2:3"


@pytest.mark.parametrize(("ranks", "steps"), [(2, 600), (3, FEWEST_STEPS - 1)])
def test_nobody_is_killed_where_the_run_could_not_go_on(ranks: int, steps: int) -> None:
    settings = Settings(ranks=ranks, steps=steps)
    assert settings.kill_at is None
    assert settings.nodes == f"{ranks}:{ranks}"


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 599, 600, 100_000])
def test_the_passes_that_a_run_completes_fit_into_its_steps(steps: int) -> None:
    settings = Settings(steps=steps)
    assert settings.passes >= 1
    assert settings.passes * settings.steps_per_pass <= steps
