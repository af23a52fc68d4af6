"""`LocalSteps` with fragments: parts of the weights take turns, and are reduced while the ranks train on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ringfort import DistributedContext, LocalSteps
from ringfort.errors import DistributedError, GradientMismatchError, InvalidArgumentError, NonFiniteError
from ringfort.testing.groups import closing_all
from ringfort.testing.ranks import run_ranks
from ringfort.training.local_steps import run as module
from ringfort.training.local_steps.choice import HIDDEN_SHARE, SHARE, Costs, Decision, decide
from ringfort.training.local_steps.weights_view import WeightsView
from tests.unit.training.local_steps.test_local_steps import bits, change, group, on, weights

PLAIN: Any = {"codec": "none", "pace": "steps", "outer_rate": 1.0, "outer_momentum": 0.0}


def shown(local: LocalSteps) -> bytes:
    with local.global_weights() as tree:
        return bits(tree)


@pytest.mark.parametrize("kind", ["float32", "float64", "float16"])
@pytest.mark.parametrize("codec", ["none", "int8", "sparse"])
def test_global_weights_have_the_same_bits_after_each_turn_and_the_tree_at_the_end(codec: Any, kind: str) -> None:
    def program(ctx: DistributedContext) -> Any:
        local = LocalSteps(ctx, tree := weights(ctx.rank, kind), every=6, codec=codec, pace="steps", fragments=3)
        found, own = [], []
        for step in range(20):
            change(tree, ctx.rank, step)
            local.step(samples=1 + ctx.rank)
            found.append(shown(local))
            own.append(bits(tree))
        local.end_round()
        return found, own, bits(tree), local.samples, local.number

    ranks = on(3, program)
    found, _, ends, samples, number = zip(*ranks, strict=True)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 11  # ten turns in 20 steps
    assert len({own[-1] for _, own, *_ in ranks}) == 3  # meanwhile, each has weights of its own
    assert ends[0] == ends[1] == ends[2] != found[0][-1]
    assert samples == (120, 120, 120)
    assert number == (4, 4, 4)


def test_a_part_becomes_the_mean_and_the_ranks_keep_half_of_their_own() -> None:
    def program(ctx: DistributedContext) -> Any:
        tree = {"w": np.zeros(4, np.float32)}
        local = LocalSteps(ctx, tree, every=2, fragments=2, **PLAIN)
        tree["w"] += 1 + ctx.rank
        local.step()  # begins with the first part: 1 and 2
        tree["w"] += 1 + ctx.rank
        local.step()  # takes it over: its mean is 1.5, and the ranks have 2 and 4 by now
        first = tree["w"].copy()
        local.end_round()
        return first.tolist(), tree["w"].tolist()

    (one, end), (other, same) = on(2, program)
    assert one == [1.75, 1.75, 2, 2]
    assert other == [2.75, 2.75, 4, 4]
    # What was not sent of the first part counts too: 1.5 + ((1.75 - 1.5) + (2.75 - 1.5)) / 2.
    assert end == same == [2.25, 2.25, 3, 3]


def test_a_rank_trains_on_while_a_part_is_reduced() -> None:
    gone_on = threading.Event()

    def program(ctx: DistributedContext) -> int:
        local = LocalSteps(ctx, tree := weights(), every=8, fragments=2, **PLAIN)
        made = 0
        for step in range(8):
            if ctx.rank == 1 and step == 3:
                assert gone_on.wait(60)  # before it has begun with its first part
            change(tree, ctx.rank, step)
            if step < 7:  # the last step takes the first part over, and waits for it
                local.step()
                made += 1
            if made == 7:
                gone_on.set()
        return made

    assert on(2, program) == [7, 7]


@pytest.mark.parametrize("times", [2, 3, 9])  # 4 turns of a round, 2 turns, and no turns
def test_a_loop_over_samples_ends_at_all_ranks_together_whatever_their_speed(times: int) -> None:
    def program(ctx: DistributedContext) -> Any:
        local = LocalSteps(ctx, tree := weights(), every=8, codec="int8", fragments=4)
        local._pace.took = lambda seconds: None  # type: ignore[method-assign]
        local._pace.seconds, steps = 0.1 * times**ctx.rank, 0
        while local.samples < 400:
            change(tree, ctx.rank, steps)
            local.step(samples=2)
            steps += 1
        local.end_round()
        return steps, local.samples, bits(tree)

    (fast, samples, one), (slow, other, two) = on(2, program)
    assert samples == other >= 400
    assert one == two
    assert 0.6 * times < fast / slow < times + 1


def test_short_rounds_are_reduced_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks turn to that, and back, at the same place, also if one has taken the decision over earlier."""
    plans = [Decision(1, "none"), Decision(6, "int8"), Decision(2, "none"), Decision(9, "sparse")]
    monkeypatch.setattr(module, "DECIDE_AFTER", 2)
    monkeypatch.setattr(module.auto, "measure_again", lambda *_: _NoTable())

    def program(ctx: DistributedContext) -> Any:
        local = LocalSteps(ctx, tree := weights(), pace="steps", fragments=3)
        local._decide = lambda *_: plans[(local.number // 2) % 4]  # type: ignore[method-assign]
        seen = []
        for step in range(60):
            change(tree, ctx.rank, step)
            local.step()
            if ctx.rank == 0:
                shown(local)
            seen.append(local.ended_round and local.number)
        local.end_round()
        return local.number, bits(tree)

    one, other = on(2, program)
    assert one == other
    assert one[0] > 6


class _NoTable:
    def predict(self, *_: object) -> float:
        return 0.0


def test_weights_that_are_not_finite_are_an_error_everywhere_and_training_continues() -> None:
    def program(ctx: DistributedContext) -> Any:
        local = LocalSteps(ctx, tree := weights(), every=4, fragments=2, **PLAIN)
        for step in range(2):
            change(tree, ctx.rank, step)
            local.step()
        if ctx.rank == 1:
            tree["b"][0][-1] = np.inf  # in the second part
        local.step()
        local.step()
        local.step()
        with pytest.raises(NonFiniteError, match="rank 1"):
            local.step()
        local.restart_round()
        clean = bits(tree)
        for step in range(6):
            change(tree, ctx.rank, step)
            local.step()
        local.end_round()
        return clean, bits(tree)

    found = on(2, program)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_state_in_the_middle_of_a_round_continues_with_the_same_bits_everywhere() -> None:
    def program(ctx: DistributedContext) -> Any:
        def new() -> LocalSteps:
            return LocalSteps(ctx, weights(ctx.rank), every=6, codec="int4", pace="steps", fragments=3)

        local = new()
        for step in range(9):  # a part is under way
            change(local.tree, ctx.rank, step)
            local.step()
        state = local.state_dict()
        other = new()
        for step in range(2):  # here too, and it does not count
            change(other.tree, ctx.rank, step)
            other.step()
        other.load_state_dict(state)
        begun = bits(other.tree)
        for step in range(9, 15):
            change(other.tree, ctx.rank, step)
            other.step()
        other.end_round()
        return state["samples"], begun, bits(other.tree), other.number

    found = on(2, program)
    assert found[0] == found[1]
    assert found[0][0] == 18  # of the five turns, the last of which was waited for


def test_a_lost_peer_is_an_error_at_the_end_of_a_turn() -> None:
    contexts = group(2)

    def program(ctx: DistributedContext) -> Any:
        local = LocalSteps(ctx, tree := weights(), every=4, fragments=2, **PLAIN)
        if ctx.rank == 1:
            ctx.close()
            return None
        change(tree, 0, 0)
        local.step()
        local.step()
        local.step()
        with pytest.raises(DistributedError, match="ank 1"):
            local.step()
        return local.number

    assert run_ranks(contexts, program)[0] == 0
    contexts[0].close()


def test_ranks_with_another_number_of_fragments_are_told() -> None:
    with closing_all(group(2)) as contexts:
        outcomes = run_ranks(contexts, lambda ctx: LocalSteps(ctx, weights(), every=4, fragments=2 + ctx.rank))
    for outcome in outcomes:
        assert isinstance(outcome, GradientMismatchError)
        assert "fragments=3" in str(outcome)


@pytest.mark.parametrize("fragments", [0, 65, 2.0, True, "2", None])
def test_invalid_numbers_of_fragments_are_refused(fragments: Any) -> None:
    (context,) = group(1)
    with pytest.raises(InvalidArgumentError, match="fragments"):
        LocalSteps(context, weights(), fragments=fragments)
    with pytest.raises(InvalidArgumentError, match="1 to 3"):
        LocalSteps(context, {"w": np.zeros(3, np.float32)}, fragments=4)
    context.close()


def test_reductions_that_are_hidden_may_take_longer() -> None:
    costs = Costs(0.1, {"none": 2.0, "int8": 0.5, "int4": 0.25, "sparse": 0.1})
    waiting, hidden = decide(costs, share=SHARE), decide(costs, share=HIDDEN_SHARE)
    assert (waiting.every, waiting.codec) == (25, "int4") or waiting.codec == "int8"
    assert hidden.every < waiting.every


@pytest.mark.parametrize("kind", ["float32", "float16", "float64"])
def test_parts_of_a_view_are_read_and_written_alone(kind: str) -> None:
    tree, other = weights(0, kind), weights(1, kind)
    view = WeightsView(tree)
    new, part = view.read(other), slice(100, 6310)  # ends in the second array
    before = view.read(tree)
    np.testing.assert_array_equal(view.difference(new, tree, part), (new - before)[part])
    view.write(new, tree, part)
    after = view.read(tree)
    np.testing.assert_array_equal(after[part], new[part])
    np.testing.assert_array_equal(after[: part.start], before[: part.start])
    np.testing.assert_array_equal(after[part.stop :], before[part.stop :])
    view.write(before, tree, part, kept=0.5)
    np.testing.assert_allclose(view.read(tree)[part], ((new + before) / 2)[part], rtol=2e-3, atol=1e-3)
