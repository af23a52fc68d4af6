"""The pure parts of local steps: the outer step, the pace, the weightings, the choice."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from ringfort.errors import InvalidArgumentError
from ringfort.training.local_steps.choice import CODECS, FEWEST, MOST, SHARE, SLACK, Costs, Decision, decide
from ringfort.training.local_steps.outer import OuterOptimizer, OuterSettings
from ringfort.training.local_steps.pace import Pace, Weighting, check_weighting, shares, steps_of

# --- the outer step ---------------------------------------------------------------------------------------------------


def test_the_outer_step_is_nesterovs() -> None:
    random = np.random.default_rng(0)
    size, rounds = 100_000, 7  # more than one piece
    outer, settings = OuterOptimizer(random.standard_normal(size).astype(np.float32)), OuterSettings(0.6, 0.9)
    weights, velocity = outer.weights.astype(np.float64), np.zeros(size)
    for _ in range(rounds):
        difference = random.standard_normal(size).astype(np.float32)
        outer.step(difference, settings)
        velocity = 0.9 * velocity + difference
        weights -= 0.6 * (difference + 0.9 * velocity)
    np.testing.assert_allclose(outer.weights, weights, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(outer.velocity, velocity, rtol=1e-4, atol=1e-4)


def test_with_rate_1_and_no_momentum_the_weights_become_the_mean() -> None:
    random = np.random.default_rng(1)
    weights = random.standard_normal(50)
    own = [weights + random.standard_normal(50) for _ in range(3)]
    outer = OuterOptimizer(weights.copy())
    outer.step(weights - np.mean(own, axis=0), OuterSettings(1.0, 0.0))
    np.testing.assert_allclose(outer.weights, np.mean(own, axis=0))


def test_an_outer_state_continues_bit_for_bit() -> None:
    random = np.random.default_rng(2)
    one, settings = OuterOptimizer(random.standard_normal(10).astype(np.float32)), OuterSettings(0.6, 0.9)
    one.step(random.standard_normal(10).astype(np.float32), settings)
    other = OuterOptimizer(np.zeros(10, np.float32))
    other.load_state_dict(one.state_dict())
    difference = random.standard_normal(10).astype(np.float32)
    for outer in (one, other):
        outer.step(difference, settings)
    assert one.weights.tobytes() == other.weights.tobytes()


@pytest.mark.parametrize(
    "state", [None, {}, {"weights": np.zeros(3), "velocity": np.zeros(4)}, {"weights": np.zeros(3)}]
)
def test_a_state_of_another_size_is_refused_and_changes_nothing(state: object) -> None:
    outer = OuterOptimizer(np.ones(3, np.float32))
    with pytest.raises(InvalidArgumentError):
        outer.load_state_dict(state)
    assert outer.weights.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("rate", "momentum"),
    [(0, 0.9), (-1, 0), (2, 0), (nan, 0), (inf, 0), (1, 1), (1, -0.1), (1, nan), (True, 0), ("1", 0)],
)
def test_outer_settings_that_no_run_can_use_are_refused(rate: float, momentum: float) -> None:
    with pytest.raises(InvalidArgumentError):
        OuterSettings(rate, momentum)


def test_rounds_of_one_step_and_sparse_ones_have_no_outer_momentum() -> None:
    plain, asked = OuterSettings(), OuterSettings(0.6, 0.9)
    assert plain == OuterSettings(1.0, 0.0)
    assert asked.of_round(5, "int8") == asked
    assert asked.of_round(1, "none") == plain
    assert asked.of_round(5, "sparse") == plain


# --- pace and weightings ----------------------------------------------------------------------------------------------


def test_a_pace_leaves_out_the_first_step_and_follows_slowly() -> None:
    pace = Pace()
    pace.took(100.0)  # the compiler
    assert pace.seconds == 0
    for seconds in (1.0, 3.0):
        pace.took(seconds)
    assert pace.seconds == 2.0
    for _ in range(100):
        pace.took(2.0)
    pace.took(7.0)
    assert pace.seconds == pytest.approx(2.5)
    for odd in (nan, inf, -1.0):
        pace.took(odd)
    assert pace.seconds == pytest.approx(2.5)


def test_a_pause_hardly_changes_a_pace_and_a_lasting_change_does() -> None:
    pace = Pace()
    for _ in range(30):
        pace.took(0.1)
    pace.took(3600.0)
    assert pace.seconds == pytest.approx(0.13)
    assert steps_of(30, [0.1, pace.seconds]) == [30, 23]
    for _ in range(60):
        pace.took(2.0)
    assert pace.seconds == pytest.approx(2.0, rel=0.05)


def test_a_machine_of_half_the_speed_makes_half_the_steps() -> None:
    assert steps_of(20, [0.1, 0.2]) == [20, 10]
    assert steps_of(20, [0.1, 0.1]) == [20, 20]
    assert steps_of(20, [0.1, 99.0]) == [20, 1]
    assert steps_of(20, [0.0, 0.2, 0.1]) == [20, 10, 20]
    assert steps_of(20, [0.0, 0.0]) == [20, 20]


@given(st.integers(1, 1000), st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6))
def test_all_arrive_within_one_step_of_the_fastest(every: int, seconds: list[float]) -> None:
    steps = steps_of(every, seconds)
    time = every * min(seconds)
    assert max(steps) == every
    for count, one in zip(steps, seconds, strict=True):
        assert count == 1 or count * one <= time * (1 + 1e-6)
        assert count == every or (count + 1) * one > time * (1 - 1e-6)


@given(
    st.sampled_from(["samples", "uniform", "normalized"]),
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 32)), min_size=1, max_size=5),
)
def test_shares_add_up_and_idle_members_count_nothing(weighting: Weighting, done: list[tuple[int, int]]) -> None:
    steps = [count for count, _ in done]
    samples = [float(count * batch) for count, batch in done]
    found = shares(weighting, steps, samples)
    assert all(share >= 0 for share in found)
    assert all(share == 0 for share, count in zip(found, steps, strict=True) if not count)
    if any(steps) and weighting != "normalized":
        assert sum(found) == pytest.approx(1)
    if len(set(done)) == 1 and any(steps):
        assert found == pytest.approx([1 / len(done)] * len(done))


def test_the_weightings_are_those_of_the_papers() -> None:
    steps, samples = [20, 10], [160.0, 80.0]
    assert shares("uniform", steps, samples) == [0.5, 0.5]
    assert shares("samples", steps, samples) == pytest.approx([2 / 3, 1 / 3])
    mean = 2 / 3 * 20 + 1 / 3 * 10
    assert shares("normalized", steps, samples) == pytest.approx([2 / 3 * mean / 20, 1 / 3 * mean / 10])
    with pytest.raises(InvalidArgumentError, match="weighting"):
        check_weighting("tokens")


# --- the choice -------------------------------------------------------------------------------------------------------


def costs(step: float, exact: float) -> Costs:
    """As on a wire that alone decides."""
    return Costs(step, {"none": exact, "int8": exact / 4, "int4": exact / 7.5, "sparse": exact / 140})


@pytest.mark.parametrize(
    ("exact", "codec", "every"),
    [
        (0.009, "none", 1),
        (0.02, "int8", FEWEST),
        (0.3, "int4", FEWEST),
        (0.4, "int4", FEWEST),
        (0.7, "int4", 10),
        (1.0, "sparse", FEWEST),
        (7.2, "sparse", 6),
        (40.0, "sparse", 29),
        (100.0, "sparse", 72),
        (1e6, "sparse", MOST),
        (inf, "sparse", MOST),
        (nan, "sparse", MOST),
    ],
)
def test_the_rule(exact: float, codec: str, every: int) -> None:
    found = decide(costs(0.1, exact))
    assert (found.codec, found.every) == (codec, every), found.why


def test_a_step_or_a_link_that_measures_as_nothing_has_a_decision() -> None:
    for step in (0.0, nan, inf, -1.0):
        found = decide(costs(step, 1.0))
        assert (found.codec, found.every) == ("sparse", MOST)
        assert found.why


def test_what_the_program_has_fixed_stays() -> None:
    assert decide(costs(0.1, 1.0), every=5) == decide(costs(0.1, 1.0), every=5)
    found = decide(costs(0.1, 1.0), every=5)
    assert (found.every, found.codec) == (5, "sparse")
    assert decide(costs(0.1, 1e-6), every=5).codec == "int8"
    found = decide(costs(0.1, 1.0), codec="int4")
    assert (found.every, found.codec) == (14, "int4")
    found = decide(costs(0.1, 1e-6), codec="none")
    assert (found.every, found.codec) == (1, "none")


times = st.floats(1e-5, 1e4)


@given(st.floats(1e-4, 1e2), times, st.floats(1 / SLACK * 1.001, SLACK * 0.999))
@example(16.0, 61.0, 1.125)  # faster by the slack, it would be int4: what was decided lies between
def test_a_decision_stays_while_times_hardly_change(step: float, exact: float, factor: float) -> None:
    first = decide(costs(step, exact))
    again = decide(costs(step, exact * factor), first)
    assert (again.every, again.codec) == (first.every, first.codec)


@given(st.floats(1e-4, 1e2), times, times)
def test_a_decision_follows_times_that_change(step: float, before: float, after: float) -> None:
    first = decide(costs(step, before))
    now = decide(costs(step, after), first)
    fresh = decide(costs(step, after))
    if (now.every, now.codec) != (fresh.every, fresh.codec):  # it stayed: it would be right for times within the slack
        near = [decide(costs(step, after * factor)) for factor in np.geomspace(1 / SLACK, SLACK, 9)]
        assert now.codec in {one.codec for one in near}


@given(st.floats(1e-4, 1e2), st.lists(times, min_size=2, max_size=8))
def test_slower_links_never_make_a_round_dearer_to_send(step: float, exact: list[float]) -> None:
    found = [decide(costs(step, one)) for one in sorted(exact)]
    for faster, slower in pairwise(found):
        sent = [
            {"none": 1, "int8": 1 / 4, "int4": 1 / 7.5, "sparse": 1 / 140}[d.codec] / d.every for d in (faster, slower)
        ]
        assert sent[1] <= sent[0] * (1 + 1e-9)


@given(st.floats(1e-4, 1e2), times)
def test_a_reduction_takes_its_share_at_most_if_that_is_possible(step: float, exact: float) -> None:
    found, all_costs = decide(costs(step, exact)), costs(step, exact)
    if found.every == 1:
        assert exact <= 0.1 * step
    elif all_costs.reductions["sparse"] <= SHARE * step * MOST:
        assert all_costs.reductions[found.codec] <= SHARE * step * found.every * (1 + 1e-9)
        assert FEWEST <= found.every <= MOST
        if found.every > 30:
            assert all(all_costs.reductions[name] > SHARE * step * 30 * (1 - 1e-9) for name in CODECS)


def test_a_decision_says_what_it_is() -> None:
    assert str(Decision(1, "none")) == "reduce every step without compression"
    assert str(Decision(20, "int8")) == "reduce every 20 steps with int8"
