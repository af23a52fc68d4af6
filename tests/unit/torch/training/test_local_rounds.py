"""What a member adds to a round: the sum, the exact part, and what the codec keeps."""

from __future__ import annotations

from threading import Lock
from typing import Any

import numpy as np
import pytest

from ringfort import DistributedContext, SimulatedBackend
from ringfort.errors import InvalidArgumentError
from ringfort.testing.groups import closing_all
from ringfort.testing.ranks import results, run_ranks

torch = pytest.importorskip("torch")

from ringfort.torch.training.local_rounds import (  # noqa: E402
    Rounds,
    RoundState,
    RoundSum,
    RoundUpdate,
)
from ringfort.torch.training.model_buffers import ModelBuffers  # noqa: E402
from ringfort.training.elastic.protocol import Result  # noqa: E402
from ringfort.training.elastic.rounds import RoundSettings  # noqa: E402
from ringfort.training.elastic.step import Done  # noqa: E402

_SEEDED = Lock()


def member(codec: str, kind: Any = None) -> tuple[Any, Rounds, RoundSum]:
    """A model with local steps: the same at all ranks."""
    with _SEEDED:  # the generator belongs to all threads
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(40, 120), torch.nn.BatchNorm1d(120)).to(kind or torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rounds = Rounds(model, optimizer, RoundSettings.of("local", 8, codec, None, None))
    names = {parameter: name for name, parameter in model.named_parameters()}
    return model, rounds, RoundSum(rounds, names, optimizer, ModelBuffers(model), overlaps=True)


def move(model: Any, rounds: Rounds, sums: RoundSum, seed: int, weight: float) -> None:
    """A local step."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=random).to(parameter.dtype))
    rounds.is_moved = True
    sums.count += weight


def together(program: Any) -> list[Any]:
    """Run two ranks."""
    contexts = [DistributedContext(backend) for backend in SimulatedBackend.create_group(2)]
    with closing_all(contexts):
        return results(run_ranks(contexts, program))


def bits(payload: dict[str, Any]) -> bytes:
    return b"".join(payload[kind].tobytes() for kind in sorted(payload))


@pytest.mark.parametrize("codec", ["none", "int8", "int4", "sparse"])
def test_a_reduction_that_is_repeated_has_the_same_bits_until_it_is_sealed(codec: str) -> None:
    def program(context: DistributedContext) -> Any:
        model, rounds, sums = member(codec)
        move(model, rounds, sums, context.rank, 1.0 + context.rank)
        first = bits(sums.reduce(context))
        payload = sums.reduce(context)
        again = bits(payload)
        sums.sealed({name: array.copy() for name, array in payload.items()})  # of a round that others have reduced
        assert bits(sums.reduce(context)) == again
        sums.sealed(sums.reduce(context))
        return first, again, bits(sums.reduce(context))

    (first, again, later), other = together(program)
    assert first == again
    assert (later != first) == (codec != "none")  # what the codec has not sent comes now
    assert other == (first, again, later)


def test_the_result_is_the_mean_difference_by_samples() -> None:
    def program(context: DistributedContext) -> Any:
        model, rounds, sums = member("none")
        own = np.concatenate([p.detach().numpy().reshape(-1) for p in model.parameters()])
        move(model, rounds, sums, context.rank, 1.0 + 2 * context.rank)
        now = np.concatenate([p.detach().numpy().reshape(-1) for p in model.parameters()])
        mean, _ = sums.moved(sums.reduce(context), 4.0)
        return own - now, mean

    (one, mean), (other, same) = together(program)
    np.testing.assert_allclose(mean, (one + 3 * other) / 4, atol=1e-7)
    assert mean.tobytes() == same.tobytes()


def test_a_member_without_a_part_adds_nothing_and_has_the_global_weights_again() -> None:
    model, rounds, sums = member("none")
    before = [p.detach().clone() for p in model.parameters()]
    move(model, rounds, sums, 1, 1.0)
    sums.clear()  # its sum was dropped, because another member has these micro-batches
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    into = np.full(rounds.outer.weights.size, 7, np.float32)
    rounds.difference(sums.count, into)
    assert not into.any()


def test_rounding_the_global_weights_to_bfloat16_is_no_step() -> None:
    model, rounds, _ = member("none", torch.bfloat16)
    rounds.outer.weights += 1e-5  # less than the model's type can tell
    rounds.restore()
    rounds.is_moved = True
    into = np.empty(rounds.outer.weights.size, np.float32)
    rounds.difference(1.0, into)
    assert not into.any()
    assert model[0].weight.dtype == torch.bfloat16


def test_weights_that_are_not_finite_are_found_by_all() -> None:
    def program(context: DistributedContext) -> Any:
        model, rounds, sums = member("int8")
        move(model, rounds, sums, 1, 1.0)
        if context.rank:
            with torch.no_grad():
                model[0].weight[0, 0] = torch.nan
        payload = sums.reduce(context)
        return bool(np.isfinite(payload["float32"]).all()), bool(np.isfinite(sums.own()["float32"]).all())

    assert together(program) == [(False, True), (False, False)]


def test_other_parameters_than_at_the_beginning_are_refused() -> None:
    model, _, sums = member("none")
    model[0].bias.requires_grad_(False)
    with pytest.raises(InvalidArgumentError, match="every_step"):
        sums.refresh()
    sums.close()


def test_other_parameters_of_the_same_number_are_refused() -> None:
    """Tensors compare their elements, and two biases of one zero are equal."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Linear(1, 1))
    for layer in model:
        torch.nn.init.zeros_(layer.bias)
    model[1].requires_grad_(False)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rounds = Rounds(model, optimizer, RoundSettings.of("local", 8, "none", None, None))
    names = {parameter: name for name, parameter in model.named_parameters()}
    sums = RoundSum(rounds, names, optimizer, ModelBuffers(model), overlaps=True)
    model[0].bias.requires_grad_(False)
    model[1].bias.requires_grad_(True)
    with pytest.raises(InvalidArgumentError, match="every_step"):
        sums.refresh()
    sums.close()


def test_a_shared_parameter_has_its_global_weights_under_both_names() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "head": torch.nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rounds = Rounds(model, optimizer, RoundSettings.of("local", 8, "none", None, None))
    state = RoundState(rounds, model, optimizer, [], None, None)

    def weights() -> dict[str, bytes]:
        return {path: np.asarray(leaf).tobytes() for path, leaf in state.leaves() if "weight" in path}

    before = weights()
    with torch.no_grad():
        model["embed"].weight.add_(1)  # a local step
    rounds.is_moved = True
    assert weights() == before
    assert len({path for path in before if "'model'" in path}) == 2


def updated(
    rounds: Rounds, model: Any, sums: RoundSum, scheduler: Any, per: str = "step", on_step: Any = None
) -> RoundUpdate:
    optimizer = scheduler.optimizer
    names = {parameter: name for name, parameter in model.named_parameters()}
    options: dict[str, Any] = {"scaler": None, "clip_norm": None, "on_step": on_step}
    return RoundUpdate(
        rounds, 4, sums, ModelBuffers(model), names, optimizer, schedulers=[scheduler], scheduler_per=per, **options
    )


@pytest.mark.parametrize("per", ["step", "pass"])
def test_a_round_without_a_mean_keeps_what_was_not_sent_and_ends_its_pass(per: str) -> None:
    def program(context: DistributedContext) -> Any:
        model, rounds, sums = member("int4")
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1, 0.5)
        update = updated(rounds, model, sums, scheduler, per)
        unsent = []
        for is_finite in (True, False, True):
            move(model, rounds, sums, context.rank, 1.0)
            payload = sums.reduce(context)
            result = Result("", len(unsent) + 1, 8 * len(unsent) + 8, payload)
            update.guard.remember()
            update.apply(Done(result, 2.0, 0.0, is_finite=is_finite, samples=8), ends_pass=True)
            unsent.append(rounds.reduction.unsent["tensors"]["difference"]["residual"].tobytes())
        update.close()
        return unsent, scheduler.last_epoch

    for (first, second, third), epochs in together(program):
        assert first == second != third
        assert epochs == (4 if per == "step" else 3)


def test_settings_that_differ_in_the_last_digit_are_told_apart() -> None:
    one, other = (str(RoundSettings.of("local", 8, "int8", rate, None)) for rate in (1 / 3, 0.333333))
    assert one != other
    assert str(RoundSettings.of("local", 8, "int8", 1, 0)) == str(RoundSettings.of("local", 8, "int8", 1.0, 0.0))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_weights_that_are_changed_in_on_step_are_the_global_ones(kind: Any) -> None:
    def program(context: DistributedContext) -> Any:
        def clamp(_: Any, step: int) -> None:
            model[0].weight.data.clamp_(-0.01, 0.01)

        model, rounds, sums = member("none", kind)
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1, 0.5)
        update = updated(rounds, model, sums, scheduler, on_step=clamp)
        move(model, rounds, sums, context.rank, 1.0)
        result = Result("", 1, 8, sums.reduce(context))
        update.guard.remember()
        update.apply(Done(result, 2.0, 0.0, samples=8), ends_pass=False)
        found = rounds.outer.weights.copy()
        rounds.restore()  # as after a round without a part
        update.close()
        return found.tobytes(), float(model[0].weight.detach().abs().max()), float(model[0].bias.detach().abs().max())

    one, other = together(program)
    assert one == other
    assert one[1] == pytest.approx(0.01, rel=0.01)
    assert one[2] > 0.05
