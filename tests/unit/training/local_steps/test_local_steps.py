"""`LocalSteps` on groups of threads: the same bits at every rank after each round, and nothing lost by an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringfort import DistributedContext, LocalSteps, SimulatedBackend
from ringfort.errors import DistributedError, GradientMismatchError, InvalidArgumentError, NonFiniteError
from ringfort.testing.groups import closing_all
from ringfort.testing.ranks import results, run_ranks
from ringfort.training.local_steps import run as module
from ringfort.training.local_steps.choice import Decision


def group(size: int) -> list[DistributedContext]:
    return [DistributedContext(backend) for backend in SimulatedBackend.create_group(size)]


def on(size: int, program: Callable[[DistributedContext], Any]) -> list[Any]:
    with closing_all(group(size)) as contexts:
        return results(run_ranks(contexts, program))


def weights(seed: int = 0, kind: str = "float32") -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {"w": random.standard_normal((70, 90)).astype(kind), "b": [random.standard_normal(33).astype(kind), None]}


def change(tree: dict[str, Any], rank: int, step: int) -> None:
    """A local step: something else at each rank."""
    random = np.random.default_rng((rank, step))
    for array in (tree["w"], tree["b"][0]):
        array[...] -= (0.01 * random.standard_normal(array.shape)).astype(array.dtype)


def bits(tree: Any) -> bytes:
    return tree["w"].tobytes() + tree["b"][0].tobytes()


@pytest.mark.parametrize("kind", ["float32", "float64", "float16"])
@pytest.mark.parametrize("codec", ["none", "int8", "int4", "sparse"])
def test_all_ranks_have_the_same_bits_after_each_round(codec: Any, kind: str) -> None:
    def program(ctx: DistributedContext) -> list[bytes]:
        tree = weights(ctx.rank, kind)  # rank 0's count
        local = LocalSteps(ctx, tree, every=4, codec=codec, pace="steps")
        found = [bits(tree)]
        for step in range(12):
            change(tree, ctx.rank, step)
            local.step()
            if local.ended_round:
                found.append(bits(tree))
        return found

    found = on(3, program)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 4  # and they have moved
    assert found[0][0] == bits(weights(0, kind))


def test_a_plain_mean_is_the_mean_of_what_all_ranks_have() -> None:
    def program(ctx: DistributedContext) -> Any:
        tree = weights()
        local = LocalSteps(ctx, tree, every=3, codec="none", pace="steps", outer_rate=1.0, outer_momentum=0.0)
        for step in range(3):
            change(tree, ctx.rank, step)
            local.step(samples=1 + ctx.rank)
        return tree, local.samples

    alone = []
    for rank in range(2):
        tree = weights()
        for step in range(3):
            change(tree, rank, step)
        alone.append(tree)
    (found, samples), _ = on(2, program)
    np.testing.assert_allclose(found["w"], (alone[0]["w"] + 2 * alone[1]["w"]) / 3, atol=1e-6)
    assert samples == 9


def test_a_slow_rank_makes_fewer_steps_and_all_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

    def program(ctx: DistributedContext) -> Any:
        tree, counts = weights(), []
        local = LocalSteps(ctx, tree, every=10, codec="none")
        local._pace.took(0)
        while local.samples < 200:
            local._pace.took(0.1 * (1 + ctx.rank))  # so much is measured beside the microseconds that it takes
            local._pace.seconds = 0.1 * (1 + ctx.rank)
            local.step(samples=4)
            counts.append(local.ended_round)
        edges = [place for place, ended in enumerate(counts) if ended]
        return np.diff([-1, *edges]).tolist(), local.samples, bits(tree)

    monkeypatch.setattr(module.Pace, "took", lambda self, seconds: None)
    (fast, samples, one), (slow, other, two) = on(2, program)
    assert fast[0] == slow[0] == 5  # nobody knows the speeds yet
    assert set(fast[1:]) == {10}
    assert set(slow[1:]) == {5}
    assert samples == other
    assert one == two


def test_half_precision_weights_that_nobody_changes_stay_as_they_are() -> None:
    """The rounding of the global weights to the type of the tree must not count as a difference."""

    def program(ctx: DistributedContext) -> Any:
        tree = weights(0, "float16")
        local = LocalSteps(ctx, tree, every=2, codec="none", pace="steps")
        change(tree, ctx.rank, 0)
        local.step()
        local.step()
        before = local.state_dict()
        local._outer.velocity[...] = 0
        local.step()
        local.step()
        return before["weights"], local.state_dict()["weights"]

    for before, after in on(2, program):
        assert before.astype(np.float16).astype(np.float32).tobytes() != before.tobytes()
        np.testing.assert_array_equal(before, after)


def test_global_weights_are_there_for_a_while() -> None:
    def program(ctx: DistributedContext) -> Any:
        tree = weights()
        local = LocalSteps(ctx, tree, every=4, codec="none", pace="steps")
        change(tree, ctx.rank, 0)
        local.step()
        own = bits(tree)
        with local.global_weights() as shown:
            inside = bits(shown)
            with pytest.raises(ZeroDivisionError), local.global_weights():
                raise ZeroDivisionError
        return own == bits(tree), inside

    for is_back, inside in on(2, program):
        assert is_back
        assert inside == bits(weights())


def test_an_estimate_of_samples_grows_and_is_exact_at_the_end_of_a_round() -> None:
    def program(ctx: DistributedContext) -> Any:
        local = LocalSteps(ctx, weights(), every=3, codec="none", pace="steps")
        seen = []
        for _ in range(9):
            local.step(samples=2 + ctx.rank)
            seen.append(local.samples_now)
        return seen, local.samples

    for seen, samples in on(2, program):
        assert seen == sorted(seen)
        assert samples == seen[-1] == 45
        # a schedule by it never ends before the training does
        assert max(seen) <= 45


def test_ranks_with_other_settings_or_shapes_are_told_what_differs() -> None:
    def other_codec(ctx: DistributedContext) -> Any:
        return LocalSteps(ctx, weights(), every=4, codec="int8" if ctx.rank else "none")

    def other_shape(ctx: DistributedContext) -> Any:
        tree = weights()
        if ctx.rank:
            tree["w"] = tree["w"][1:]
        return LocalSteps(ctx, tree, every=4)

    for program, words in ((other_codec, "codec=int8"), (other_shape, "(69, 90)")):
        with closing_all(group(2)) as contexts:
            outcomes = run_ranks(contexts, program)
        for outcome in outcomes:
            assert isinstance(outcome, GradientMismatchError)
            assert words in str(outcome)


def test_weights_that_are_not_finite_are_an_error_everywhere_and_change_nothing() -> None:
    def program(ctx: DistributedContext) -> Any:
        tree = weights()
        local = LocalSteps(ctx, tree, every=2, codec="int8", pace="steps")
        local.step()
        if ctx.rank == 1:
            tree["w"][3, 4] = np.nan
        with pytest.raises(NonFiniteError, match="rank 1"):
            local.step()
        assert local.number == 0
        local.restart_round()
        clean = bits(tree)
        for step in range(2):
            change(tree, ctx.rank, step)
            local.step()
        return clean, bits(tree), local.number

    found = on(2, program)
    assert found[0] == found[1]
    assert found[0][0] == bits(weights())
    assert found[0][2] == 1


def test_a_model_that_changes_in_a_round_is_an_error_that_names_the_array() -> None:
    contexts = group(1)
    local = LocalSteps(contexts[0], tree := weights(), every=2)
    tree["w"] = tree["w"][:, :5]
    with pytest.raises(InvalidArgumentError, match=r"tree\['w'\].*float32\(70, 90\)"):
        local._view.read(tree)
    del tree["w"]
    with pytest.raises(InvalidArgumentError, match="missing"):
        local._view.read(tree)
    contexts[0].close()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"every": 0}, "every"),
        ({"every": 2.5}, "every"),
        ({"every": True}, "every"),
        ({"every": "often"}, "every"),
        ({"codec": "zip"}, "codec"),
        ({"codec": None}, "codec"),
        ({"weighting": "tokens"}, "weighting"),
        ({"pace": "fast"}, "pace"),
        ({"outer_rate": -1}, "outer_rate"),
        ({"outer_momentum": 1}, "outer_momentum"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], name: str) -> None:
    (context,) = group(1)
    with pytest.raises(InvalidArgumentError, match=name):
        LocalSteps(context, weights(), **arguments)
    context.close()


@pytest.mark.parametrize("tree", [{"w": np.arange(3)}, {}, {"w": None}, {"w": np.zeros(3, np.complex64)}])
def test_weights_that_are_not_floating_point_are_refused(tree: Any) -> None:
    (context,) = group(1)
    with pytest.raises(InvalidArgumentError):
        LocalSteps(context, tree)
    context.close()


@pytest.mark.parametrize("samples", [-1, float("nan"), float("inf"), "4", True, None])
def test_samples_that_are_no_number_are_refused(samples: Any) -> None:
    (context,) = group(1)
    local = LocalSteps(context, weights())
    with pytest.raises(InvalidArgumentError, match="samples"):
        local.step(samples=samples)
    context.close()


def test_alone_nothing_is_averaged_and_samples_count() -> None:
    (context,) = group(1)
    tree = weights()
    local = LocalSteps(context, tree, every=2)
    change(tree, 0, 0)
    own = bits(tree)
    assert local.step(samples=8) is tree
    local.step(samples=8)
    local.end_round()
    with local.global_weights():
        assert bits(tree) == own
    assert (local.samples, local.samples_now) == (16, 16)
    context.close()


def test_a_state_continues_with_the_same_bits_and_rank_0s_counts() -> None:
    def rounds(ctx: DistributedContext, local: LocalSteps, begin: int, end: int) -> None:
        for step in range(begin, end):
            change(local.tree, ctx.rank, step)
            local.step()

    def new(ctx: DistributedContext) -> LocalSteps:
        return LocalSteps(ctx, weights(), every=4, codec="int4", pace="steps")

    def whole(ctx: DistributedContext) -> bytes:
        local = new(ctx)
        rounds(ctx, local, 0, 16)
        return bits(local.tree)

    def halves(ctx: DistributedContext) -> bytes:
        local = new(ctx)
        rounds(ctx, local, 0, 8)
        state = local.state_dict()
        other = new(ctx)
        other.load_state_dict(state)
        assert other.number == 2
        rounds(ctx, other, 8, 16)
        return bits(other.tree)

    def joined(ctx: DistributedContext) -> bytes:
        local = new(ctx)
        rounds(ctx, local, 0, 8)
        other = new(ctx)
        other.load_state_dict(local.state_dict() if ctx.rank == 0 else None)
        rounds(ctx, other, 8, 16)
        return bits(other.tree)

    first, again, third = on(2, whole), on(2, halves), on(2, joined)
    assert first == again
    assert third[0] == third[1]
    (context,) = group(1)
    local = LocalSteps(context, weights())
    with pytest.raises(InvalidArgumentError):
        local.load_state_dict({"weights": np.zeros(3)})
    context.close()


def test_a_lost_peer_ends_the_round_and_the_global_weights_stay() -> None:
    contexts = group(2)

    def program(ctx: DistributedContext) -> Any:
        local = LocalSteps(ctx, tree := weights(), every=2, codec="none", pace="steps")
        for step in range(3):
            change(tree, ctx.rank, step)
            local.step()
        if ctx.rank == 1:
            ctx.close()
            return None
        before = local.state_dict()["weights"]
        with pytest.raises(DistributedError):
            local.step()
        with local.global_weights() as shown:
            return np.array_equal(before[: shown["w"].size], shown["w"].reshape(-1)), local.number

    outcomes = results(run_ranks(contexts, program))
    assert outcomes[0] == (True, 1)
    contexts[0].close()


def test_auto_decides_after_the_first_round_and_every_20_rounds_at_all_ranks_alike() -> None:
    def program(ctx: DistributedContext) -> Any:
        local = LocalSteps(ctx, tree := weights())
        seen = []
        while local.number < 22:
            change(tree, ctx.rank, local.number)
            local._pace.seconds = 1e-4
            before = local.decision
            local.step()
            if local.decision is not before:
                seen.append((local.number, str(local.decision)))
        return seen, bits(tree)

    (one, first), (other, second) = on(2, program)
    assert one == other
    assert {number for number, _ in one} <= {1, 21}
    assert one[0][0] == 1
    assert first == second


def test_a_fixed_choice_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.auto, "measure_again", lambda *_: pytest.fail("measured"))

    def program(ctx: DistributedContext) -> Decision:
        local = LocalSteps(ctx, weights(), every=1, codec="none")
        for _ in range(3):
            local.step()
        return local.decision

    assert on(2, program)[0].every == 1


def test_torch_parameters_are_written_in_place() -> None:
    torch = pytest.importorskip("torch")

    def program(ctx: DistributedContext) -> Any:
        model = torch.nn.Linear(5, 3).to(torch.bfloat16 if ctx.world_size == 3 else torch.float32)
        local = LocalSteps(ctx, dict(model.named_parameters()), every=2, codec="none", pace="steps")
        with torch.no_grad():
            model.weight += ctx.rank
        local.step()
        local.step()
        return model.weight.detach().float().numpy().tolist()

    for size in (2, 3):
        found = on(size, program)
        assert all(one == found[0] for one in found)


def test_arrays_that_cannot_be_written_are_replaced() -> None:
    jax = pytest.importorskip("jax")

    def program(ctx: DistributedContext) -> Any:
        tree = {"w": jax.numpy.ones((4, 4))}
        local = LocalSteps(ctx, tree, every=2, codec="none", pace="steps", outer_rate=1.0, outer_momentum=0.0)
        tree = local.tree
        for _ in range(2):
            tree = local.step({"w": tree["w"] + ctx.rank})
        with pytest.raises(InvalidArgumentError, match="must be passed"):
            local.step()
        return np.asarray(tree["w"]).tolist()

    found = on(2, program)
    assert found[0] == found[1] == np.full((4, 4), 2.0).tolist()


def test_alone_a_state_has_the_steps_that_were_made() -> None:
    (context,) = group(1)
    local = LocalSteps(context, tree := weights(), every=2)
    for step in range(5):
        change(tree, 0, step)
        local.step()
        assert local.ended_round
    trained, state = bits(tree), local.state_dict()
    other = LocalSteps(context, later := weights(), every=2)
    other.load_state_dict(state)
    assert bits(later) == trained != bits(weights())
    context.close()


def test_a_round_without_a_step_changes_nothing() -> None:
    """Momentum would move the weights although nobody has learned anything."""

    def program(ctx: DistributedContext) -> Any:
        local = LocalSteps(ctx, tree := weights(), every=2, codec="int8", pace="steps")
        for step in range(2):
            change(tree, ctx.rank, step)
            local.step()
        before = bits(tree)
        local.end_round()
        return before == bits(tree), local.number, local.ended_round

    assert on(2, program) == [(True, 1, True)] * 2


def test_ranks_agree_if_one_alone_has_something_unsent() -> None:
    """The state of rank 0 may come from rounds with a codec, and the others may have none."""

    def program(ctx: DistributedContext) -> Any:
        local = LocalSteps(ctx, tree := weights(), every=2, codec="int4", pace="steps")
        for step in range(2):
            change(tree, ctx.rank, step)
            local.step()
        state = local.state_dict() if ctx.rank == 0 else None
        exact = LocalSteps(ctx, tree, every=2, codec="none", pace="steps")
        exact.load_state_dict(state)
        for step in range(2, 4):
            change(tree, ctx.rank, step)
            exact.step()
        return bits(tree), exact.number

    one, other = on(2, program)
    assert one == other
    assert one[1] == 2


def test_after_a_load_auto_decides_after_the_first_round() -> None:
    def program(ctx: DistributedContext) -> Any:
        local = LocalSteps(ctx, tree := weights())
        state = local.state_dict()
        local.load_state_dict({**state, "number": 7, "samples": 300.0})
        estimates = []
        while local.number == 7:
            change(tree, ctx.rank, 0)
            local.step(samples=4)
            estimates.append(local.samples_now)
        return estimates, local.decision.why

    for estimates, why in on(2, program):
        assert estimates == [308, 316, 324, 332, 340]
        assert "measured" not in why


@pytest.mark.parametrize("bad", [{"number": "many"}, {"samples": None}, {"compressor": {}}, {"velocity": np.zeros(3)}])
def test_a_state_that_is_refused_changes_nothing(bad: dict[str, Any]) -> None:
    (context,) = group(1)
    local = LocalSteps(context, weights())
    before = local.state_dict()
    other = LocalSteps(context, weights(1))
    with pytest.raises(InvalidArgumentError):
        local.load_state_dict({**other.state_dict(), "number": 3, **bad})
    assert local._outer.weights.tobytes() == before["weights"].tobytes()
    assert (local.number, local.samples) == (0, 0)
    context.close()
