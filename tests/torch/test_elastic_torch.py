"""Real processes train torch models elastically on loopback: machines come and go, and programs make mistakes."""

from __future__ import annotations

import signal
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from tests.helpers.traces import by_rank
from tests.torch.zygote import Outcome, Zygote

pytest.importorskip("torch")

TOTAL = 40


def outcomes(zygote: Zygote, home: Path, scenario: str, world_size: int, *arguments: Any) -> list[Outcome]:
    """Return what became of each process. They are a cluster of their own."""
    (home / "home").mkdir(0o700, exist_ok=True)
    variables = {"RINGFORT_HOME": str(home / "home")}
    return zygote.outcomes(f"torch.elastic_scenarios.{scenario}", world_size, *arguments, patience=90.0, **variables)


def values(found: list[Outcome], codes: list[int]) -> list[Any]:
    """Return what processes returned, after a look at their exit codes."""
    assert [one.code for one in found] == codes, "\n".join(one.words for one in found)
    return [one.value for one in found if one.value is not None]


def test_a_run_with_kills_and_joins_ends_with_the_state_and_losses_of_one_without(
    zygote: Zygote, tmp_path: Path
) -> None:
    """One member of two dies, and its micro-batches are computed by others; one comes when weights are unfrozen."""
    quiet, stormy = tmp_path / "quiet", tmp_path / "stormy"
    quiet.mkdir()
    stormy.mkdir()
    [alone] = values(outcomes(zygote, quiet, "churn", 1, str(quiet), TOTAL, {}, {}), [0])
    deaths, births = {"1": 20}, {"2": TOTAL // 3 - 1}
    found = outcomes(zygote, stormy, "churn", 3, str(stormy), TOTAL, deaths, births)
    ends = values(found, [0, -signal.SIGKILL, 0])
    assert ends[0]["state"] == ends[1]["state"]
    for end in (alone, *ends):
        assert end["number"] == TOTAL
        assert end["seen"] == [TOTAL * 16 / 64]  # each sample once in each pass
    for step, loss in ends[0]["losses"].items():
        assert loss == pytest.approx(alone["losses"][step], rel=0.01), f"step {step}"


def test_mistakes_of_a_program_are_errors_that_say_what_to_do(zygote: Zygote, tmp_path: Path) -> None:
    [found] = values(outcomes(zygote, tmp_path, "misuse", 1), [0])
    loop = "call run.backward(loss) and run.step() once for each batch of run.loader()"
    for what in ("backward before", "step before", "step twice", "backward after", "at the end"):
        assert f"no batch is being computed; {loop}" in found[what], what
    for what in ("no gradients 0", "no gradients 3"):
        assert f"this batch has no gradients; {loop}" in found[what]
    assert "loss='Tensor': must be a tensor of one number, the mean loss" in found["loss"]
    assert "loss='float': must be a tensor of one number" in found["float"]
    assert "weight=-1: must be the number of samples, or of tokens" in found["weight"]
    assert "must be the number of samples, or of tokens" in found["weights"]
    assert "a run has one loop; make another run for another one" in found["second loader"]
    assert "call run.step() instead, which calls it when the step is sealed" in found["optimizer"]
    assert found["state"] == "3 [0.0, 1.0]"  # nothing of that has changed the run
    assert found["forgotten"] == f"InvalidArgumentError: run.loader()='step 1': {loop}"
    assert found["on_step"] == "KeyError: 'on_step'"
    assert found["after on_step"] == "ChannelClosedError: This run is closed"  # its state is half a step further
    assert "call run.backward(loss) in place of loss.backward()" in found["unscaled"]


def test_loops_of_every_kind_are_members_of_one_run(zygote: Zygote, tmp_path: Path) -> None:
    """One member leaves in a hook of its model, one is told to end; one has the loop that it always had."""
    left, told, stays = outcomes(zygote, tmp_path, "loops", 3, 160, 2)
    assert (left.code, told.code, stays.code) == (0, 1, 0), left.words + told.words + stays.words
    assert "SystemExit: 143" in told.words
    assert 4 <= left.value["number"] < 160
    assert stays.value["number"] == 160
    assert stays.value["seen"] == [40.0]
    assert stays.value["validations"] > 0


def test_machines_of_other_kinds_are_members_of_one_run(zygote: Zygote, tmp_path: Path) -> None:
    """One drifts, and takes the state of the others; one has compiled its model."""
    found = values(outcomes(zygote, tmp_path, "kinds", 3, 200), [0, 0, 0])
    assert found[0]["state"] == found[1]["state"] == found[2]["state"]
    for one in found:
        assert one["number"] == 200
        assert one["seen"] == [50.0]
        assert len(one["drift"]) == 1  # it drifts again, and that is not said again
        assert "(Mac) has drifted up to step 100 in state['model']['first.bias'], " in one["drift"][0]
        assert "takes that of machines with PC" in one["drift"][0]


def test_a_run_that_lost_all_members_continues_with_its_checkpoint(zygote: Zygote, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    [expected] = values(outcomes(zygote, whole, "restart", 1, str(whole / "saved"), 12, -2), [0])
    values(outcomes(zygote, broken, "restart", 1, str(broken / "saved"), 12, 9), [-signal.SIGKILL])
    [found] = values(outcomes(zygote, broken, "restart", 1, str(broken / "saved"), 12, -2), [0])
    assert 4 <= found["first"] <= 9
    assert found["state"] == expected["state"]
    assert found["seen"] == [3.0]


def test_a_program_may_ask_leave_and_close_in_on_step(zygote: Zygote, tmp_path: Path) -> None:
    [found] = values(outcomes(zygote, tmp_path, "callbacks", 1), [0])
    assert [line[:6] for line in found["told"]] == [[step, step, step // 4, 1, True, True] for step in range(1, 6)]
    assert len({line[6] for line in found["told"]}) == 5  # numbers that depend on the step
    assert found["returned"] == [False, False, False, True] * 5
    assert all("no batch is being computed" in error for error in found["errors"])
    assert found["closed"] == "ChannelClosedError: This run is closed"


def test_gradients_that_are_not_finite_are_an_error_that_names_the_machine(zygote: Zygote, tmp_path: Path) -> None:
    [found] = values(outcomes(zygote, tmp_path, "nonfinite", 1), [0])
    assert found.startswith(f"The gradients and loss of step 4 contain infinite or NaN elements ({gethostname()})")


def test_those_who_watch_see_steps_seals_samples_and_who_loads(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(0o700)
    variables = {"RINGFORT_TELEMETRY": str(tmp_path), "RINGFORT_HOME": str(tmp_path / "home")}
    zygote.run("torch.watched_scenarios.elastic", 2, str(tmp_path), **variables)
    slow, quick = sorted(by_rank(tmp_path), key=lambda written: written.values["name"][8])
    for written in (slow, quick):
        header = written.header
        assert (header.world_size, header.run, header.total_steps) == (2, "watched", 8)
        assert header.gradient_bytes >= 4 * 5 * 256
        assert (written.step, written.numbers) == (8, list(range(1, 9)))
        assert list(written.values["loss"]) == written.numbers
        assert min(step.seal for step in written.steps) > 0
        assert {"epoch", "checkpoint"} <= {kind for kind, _ in written.events}
    assert [mine + theirs for mine, theirs in zip(slow.samples, quick.samples, strict=True)] == [16] * 8
    assert slow.total("compute") > 0.9 * 0.05 * sum(slow.samples) / 4
    assert quick.total("data") > 0.9 * 0.01 * sum(quick.samples) / 4
    assert quick.usual("exchange") > max(0.01, slow.least("exchange"))  # it waits while the other computes


def test_the_nested_loop_of_ordinary_scripts_is_one_pass_per_for(zygote: Zygote, tmp_path: Path) -> None:
    [found] = values(outcomes(zygote, tmp_path, "epochs", 1), [0])
    assert (found["length"], found["batches"]) == (16, [16, 3, 13, 16])
    assert found["again"][0] == found["again"][1]
    assert (found["number"], found["seen"], found["rate"]) == (12, [3.0], 0.05 * 0.5**3)
    assert "pass the scheduler to elastic(scheduler=)" in found["stepped"]
    assert 'pass per="pass" to loader()' in found["second"]
    assert found["is_free"]  # an error in the loop has ended the run, and given the model back
