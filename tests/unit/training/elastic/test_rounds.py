"""Rounds of local steps: settings, what is added up, how the next rounds are planned, and the state of arrays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ringfort import DistributedContext, SimulatedBackend
from ringfort.compression import auto
from ringfort.errors import InvalidArgumentError
from ringfort.testing.groups import closing_all
from ringfort.testing.ranks import results, run_ranks
from ringfort.training.elastic.array_rounds import RoundSource, RoundSum, RoundTree
from ringfort.training.elastic.protocol import Compute, Mark, Result
from ringfort.training.elastic.rounds import WORDS, RoundPlan, RoundSettings, round_settings
from ringfort.training.elastic.step import Done, Turn

LOCAL = RoundSettings.of("local", 8, "none", 1.0, 0.0)
AUTO = RoundSettings.of("auto", None, None, None, None)


def together(program: Callable[[DistributedContext], Any], size: int = 2) -> list[Any]:
    contexts = [DistributedContext(backend) for backend in SimulatedBackend.create_group(size)]
    with closing_all(contexts):
        return results(run_ranks(contexts, program))


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("often", None, None, None, None), "sync"),
        (("every_step", 8, None, None, None), "every"),
        (("every_step", None, "int8", None, None), "codec"),
        (("every_step", None, None, None, 0.5), "outer_momentum"),
        (("auto", 8, None, None, None), "every"),
        (("local", 0, None, None, None), "every"),
        (("local", True, None, None, None), "every"),
        (("local", 8, "zip", None, None), "codec"),
        (("local", 8, None, 3.0, None), "outer_rate"),
        (("auto", None, None, None, 1.0), "outer_momentum"),
    ],
)
def test_a_setting_that_no_run_can_have_is_named(given: tuple[Any, ...], name: str) -> None:
    with pytest.raises(InvalidArgumentError) as found:
        round_settings(*given)
    assert found.value.name == name


def test_the_outer_step_follows_the_codec_and_the_length_of_a_round() -> None:
    assert round_settings("every_step", None, None, None, None) is None
    assert (AUTO.outer.rate, AUTO.outer.momentum) == (1.0, 0.0)
    asked = round_settings("local", 64, "int8", 0.6, 0.9)
    assert asked is not None
    assert (asked.outer.rate, asked.outer.momentum) == (0.6, 0.9)
    assert "rate 0.6, momentum 0.9" in str(asked)  # which members compare


def test_a_plan_survives_as_numbers_of_float32() -> None:
    for plan in (RoundPlan(100_000, "sparse", 100), RoundPlan(1, "none", 1), RoundPlan(10, "int8")):
        assert RoundPlan.of(np.array(plan.words, np.float32).tolist()) == plan


# --- planning ---------------------------------------------------------------------------------------------------------


def planned_by(
    monkeypatch: pytest.MonkeyPatch, rates: list[float], seconds: tuple[float, float] = (0.05, 0.1), rounds: int = 60
) -> list[RoundPlan]:
    """Return the plan after each round of two members, whose link has the rate that is the first of `rates` when it is
    measured first, and so on; the last one stays. All find the same."""
    plain = auto.Table((0, 1), 1e-4, 1.0, auto.NOMINAL)
    found = list[RoundPlan]()
    measured = [0, 0]

    def measure_again(group: Any) -> auto.Table:
        rate = rates[min(measured[group.rank], len(rates) - 1)]
        measured[group.rank] += 1
        return replace(plain, per_byte=8 / rate)

    monkeypatch.setattr(auto, "measure_again", measure_again)

    def program(context: DistributedContext) -> list[RoundPlan]:
        tree = RoundTree({"w": np.zeros(50_000, np.float32)}, AUTO)
        sums, reduction = RoundSum(tree), tree.reduction
        reduction.step_seconds = lambda: seconds[context.rank]
        plans = list[RoundPlan]()
        for _ in range(rounds):
            sums.count, tree.is_moved = 1.0, True
            [total] = sums.reduce(context).values()
            reduction.sealed(total, total[:WORDS].tolist())
            plans.append(reduction.plan)
        return plans

    first, second = together(program)
    assert first == second
    found += first
    return found


def test_members_measure_in_the_second_round_of_a_group_and_then_after_twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    # A reduction takes milliseconds here, and is expected to: whether it is off does not decide.
    monkeypatch.setattr("ringfort.training.elastic.rounds._NOISE", 1e9)
    plans = planned_by(monkeypatch, [1e6, 1e9, 1e6])
    changes = [number for number, (a, b) in enumerate(pairwise(plans), 2) if a != b]
    assert changes == [2, 22, 42]
    slow, fast = plans[1], plans[21]
    assert slow.every > fast.every
    assert plans[41] == slow
    assert slow.steps == slow.every + slow.every // 2  # a machine of half the speed makes half the steps


def test_the_log_says_that_rounds_of_one_step_are_not_exact_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ringfort.elastic"):
        assert planned_by(monkeypatch, [1e9], rounds=3)[-1].every == 1
        [fast, *_] = caplog.messages
        caplog.clear()
        assert planned_by(monkeypatch, [1e6], rounds=3)[-1].every > 1
        [slow, *_] = caplog.messages
    assert 'the weights are averaged: sync="every_step" averages gradients' in fast
    assert "every_step" not in slow


def test_a_reduction_that_takes_another_time_than_expected_is_measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # At 10 kbit/s it should take minutes, and takes milliseconds.
    plans = planned_by(monkeypatch, [1e4, 1e9], rounds=5)
    assert plans[1] != plans[0]
    assert plans[2] != plans[1]


def test_a_decision_stays_while_measurements_hardly_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfort.training.elastic.rounds._NOISE", 1e9)
    plans = planned_by(monkeypatch, [1e6, 1.05e6, 0.95e6])
    assert len({plan.every for plan in plans[1:]}) == 1


def test_a_member_alone_plans_nothing() -> None:
    def program(context: DistributedContext) -> RoundPlan:
        tree = RoundTree({"w": np.zeros(10)}, AUTO)
        sums = RoundSum(tree)
        for _ in range(30):
            [total] = sums.reduce(context).values()
            tree.reduction.sealed(total, total[:WORDS].tolist())
        return tree.reduction.plan

    assert together(program, 1) == [AUTO.first]


# --- arrays -----------------------------------------------------------------------------------------------------------


class Run:
    """A participant's part in a source: it has no other member."""

    raises = False

    def __init__(self, sums: RoundSum) -> None:
        self.local = sums
        self.covered: set[int] = set()
        self.meter = type("Meter", (), {"samples": 4, "speed": 0.0})()

    def begin(self) -> None:
        if not self.covered:
            self.local.begin()

    def has_added(self, turn: Turn) -> bool:
        return turn.compute.part in self.covered

    def samples_of(self, turn: Turn) -> Any:
        return np.arange(4)

    def unit_of(self, turn: Turn) -> int:
        return 8

    def added(self, turn: Turn) -> None:
        self.covered.add(turn.compute.part)

    def part_seconds(self) -> float:
        return 0.0


def member(state: Any, settings: RoundSettings = LOCAL) -> tuple[RoundTree, RoundSum, RoundSource]:
    tree = RoundTree(state, settings)
    sums = RoundSum(tree)
    return tree, sums, RoundSource(Run(sums), tree, sums)  # type: ignore[arg-type]


def turn(part: int) -> Turn:
    return Turn(Compute(1, part, None), Mark())  # type: ignore[arg-type]


def sealed(sums: RoundSum, context: DistributedContext, weight: float, *, is_finite: bool = True) -> Done:
    return Done(Result("b", 1, 8, sums.reduce(context)), weight, 0.0, is_finite=is_finite, samples=8)


def test_members_of_unequal_share_move_the_weights_by_their_samples() -> None:
    def program(context: DistributedContext) -> Any:
        state = {"w": np.zeros(3, np.float32), "b": [np.float64(0) * np.ones(2)], "n": 7, "ids": np.arange(3)}
        tree, sums, source = member(state)
        for part in range(1 + 2 * context.rank):  # one local step here, three there
            source.samples_of(turn(part))
            state["w"] -= 1 + context.rank
            state["b"][0] += 1
            source.add(turn(part), None, None, 0.5)
        assert sums.count == (1 + 2 * context.rank) * 4 / 8
        done = sealed(sums, context, 2.0)
        source.sealed(done)
        assert not tree.is_moved
        return state["w"].tolist(), state["b"][0].tolist(), state["n"], tree.outer.weights.dtype.name

    found = together(program)
    # (0.5 * -1 + 1.5 * -6) / 2, and (0.5 * 1 + 1.5 * 3) / 2
    assert found == [([-4.75] * 3, [2.5] * 2, 7, "float64")] * 2


def test_a_round_that_is_dropped_leaves_the_global_weights() -> None:
    def program(context: DistributedContext) -> Any:
        state = {"w": np.full(3, 2.0)}
        _, sums, source = member(state)
        for how in ("not finite", "overtaken", "empty"):
            source.samples_of(turn(0))
            state["w"] += 1
            source.add(turn(0), None, None, 0.0)
            done = sealed(sums, context, 0.0 if how == "empty" else 1.0, is_finite=how != "not finite")
            source.sealed(done._replace(is_overtaken=how == "overtaken"))
            source.applied(done)
            assert state["w"].tolist() == [2.0] * 3, how
        return True

    assert together(program, 1) == [True]


def test_weights_that_are_not_finite_are_found_by_all_members() -> None:
    def program(context: DistributedContext) -> Any:
        state = {"w": np.zeros(3)}
        _, sums, source = member(state, RoundSettings.of("local", 8, "int8", None, None))
        source.samples_of(turn(0))
        state["w"][1] = np.inf if context.rank else 1.0
        source.add(turn(0), None, None, 0.0)
        [total] = sums.reduce(context).values()
        return bool(np.isnan(total[:WORDS]).all()), bool(np.isfinite(total[WORDS:]).all())

    assert together(program) == [(True, True)] * 2


def test_what_the_program_changes_between_rounds_is_global() -> None:
    def program(context: DistributedContext) -> Any:
        state = {"w": np.zeros(4, np.float16)}
        tree, sums, source = member(state)
        source.samples_of(turn(0))
        state["w"] += np.float16(0.1)  # which float16 does not have
        source.add(turn(0), None, None, 0.0)
        done = sealed(sums, context, 0.5)
        source.sealed(done)
        source.applied(done)
        before = tree.outer.weights.copy()
        state["w"][1] = 3
        source.applied(done)
        return (
            before.tolist() == [float(np.float16(0.1))] * 4,
            tree.outer.weights.tolist()[1],
            tree.image().data.size > 0,
        )

    assert together(program, 1) == [(True, 3.0, True)]


def test_an_image_has_the_global_weights_in_the_middle_of_a_round_and_is_loaded_whole() -> None:
    mine = {"w": np.zeros(3, np.float32), "n": 1, "text": "a", "ids": np.arange(2)}
    tree, _, source = member(mine)
    source.samples_of(turn(0))
    mine["w"] += 5
    tree.outer.velocity[...] = 4
    tree.reduction.plan = RoundPlan(48, "int4", 16)
    image = tree.image()
    theirs = {"w": np.ones(3, np.float32), "n": 2, "text": "b", "ids": np.zeros(2, int)}
    other = RoundTree(theirs, LOCAL)
    other.load(image)
    assert theirs["w"].tolist() == [0.0] * 3
    assert (theirs["n"], theirs["text"], theirs["ids"].tolist()) == (1, "a", [0, 1])
    assert other.outer.velocity.tolist() == [4.0] * 3
    assert other.planned_steps == 48
    assert other.reduction.plan == RoundPlan(48, "int4", 16)
    with tree.shown():
        assert mine["w"].tolist() == [0.0] * 3
    assert mine["w"].tolist() == [5.0] * 3


@pytest.mark.parametrize("state", [{"w": np.zeros(4, np.float32), "n": 1}, {"w": np.zeros(3, np.float32)}])
def test_a_state_of_other_leaves_does_not_fit(state: Any) -> None:
    tree = RoundTree({"w": np.zeros(3, np.float32), "n": 1}, LOCAL)
    assert "missing" in tree.misfit(RoundTree(state, LOCAL).manifest()) or "float32" in tree.misfit(
        RoundTree(state, LOCAL).manifest()
    )


def test_mistakes_with_local_steps_say_what_to_do() -> None:
    with pytest.raises(InvalidArgumentError, match="no array of floats"):
        RoundTree({"n": 1, "ids": np.arange(3)}, LOCAL)
    _, sums, source = member({"w": np.zeros(3)})
    with pytest.raises(InvalidArgumentError, match=r"then call step\.add\(\)"):
        source.add(turn(0), {"w": np.zeros(3)}, None, 0.0)
    with pytest.raises(InvalidArgumentError, match="averages the weights in the state itself"):
        source.mean_of(Done(Result("b", 1, 8, {}), 1.0, 0.0))
    assert sums.count == 0
