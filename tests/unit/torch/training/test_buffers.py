"""Buffers of models: every micro-batch starts from the values of the last step, and all members apply the mean."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from ringfort.errors import InvalidArgumentError
from tests.helpers.torch_members import DATA, Member, Program, rows, train

NORM = torch.nn.BatchNorm1d


def program(module: Any, **options: Any) -> Program:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), module, torch.nn.Linear(3, 1))
    return Program(model, torch.optim.SGD(model.parameters(), lr=0.0), options=options)


def trained(make: Any, steps: int = 3) -> Member:
    """Return one of two members and a late one that have trained; all have the same state."""
    members = [Member(make()) for _ in range(2)]
    train(members, steps - 1)
    members.append(Member(make()))
    members[2].join(members[0])
    train(members, 1)
    assert members[0].leaves() == members[1].leaves() == members[2].leaves()
    return members[2]


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_statistics_are_those_of_the_mean_over_the_micro_batches(momentum: float | None, kind: Any) -> None:
    def make() -> Program:
        found = program(NORM(3, momentum=momentum))
        found.model.to(kind)
        found.loss = lambda model, indices, step: model(rows(indices)[0].to(kind)).mean()
        return found

    member = trained(make)
    norm, first = member.program.model[1], member.program.model[0]
    mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    cursor = 0
    for number in range(1, 4):
        span, share = DATA.span(cursor), 1 / number if momentum is None else momentum
        cursor += span.samples
        parts = [first(rows(DATA.part(span, one))[0].to(kind)).detach().double() for one in range(DATA.parts(span))]
        mean += share * (sum(part.mean(0) for part in parts) / len(parts) - mean)
        variance += share * (sum(part.var(0) for part in parts) / len(parts) - variance)
    assert norm.num_batches_tracked.item() == 3
    torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(norm.running_var.double(), variance, rtol=1e-6, atol=1e-7)


def test_an_evaluation_in_training_mode_between_steps_leaves_no_trace() -> None:
    quiet, noisy = Member(program(NORM(3))), Member(program(NORM(3)))
    for _ in range(3):
        noisy.program.model(rows(range(8))[0] * 5)
        train([quiet], 1)
        train([noisy], 1)
    assert quiet.leaves() == noisy.leaves()


@pytest.mark.parametrize("clip_norm", [0.3, 1e-42])
def test_clipping_concerns_gradients_only(clip_norm: float) -> None:
    clipped, free = (trained(lambda given=given: program(NORM(3), **given)) for given in ({"clip_norm": clip_norm}, {}))
    for name, buffer in free.program.model.named_buffers():
        assert torch.equal(clipped.program.model.get_buffer(name), buffer), name


class Counting(torch.nn.Module):
    """Has buffers of many kinds. Some are written in place, some replaced; one never changes and is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("is_ready", torch.tensor([False, False]))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("short", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.calls += 1
            self.is_ready[0] = True
            self.mean = self.mean * 0.5 + x.detach().mean(0) * 0.5
            self.short += 1.0
            self.wave = self.wave + torch.tensor([1j, 2.0])
            self.cache += 1
        return x


def test_buffers_of_every_kind_are_averaged_whether_they_are_written_or_replaced() -> None:
    member = trained(lambda: program(Counting()))
    module, mean, cursor = member.program.model[1], torch.zeros(3), 0
    for _ in range(3):
        span = DATA.span(cursor)
        cursor += span.samples
        inner = member.program.model[0](
            rows([one for part in range(DATA.parts(span)) for one in DATA.part(span, part)])[0]
        )
        mean = mean * 0.5 + inner.detach().mean(0) * 0.5
    assert module.calls.item() == 3
    assert module.is_ready.tolist() == [True, False]
    torch.testing.assert_close(module.mean, mean, rtol=1e-6, atol=1e-7)
    assert module.short.tolist() == [3.0] * 3
    assert module.wave.tolist() == [3j, 6.0]
    assert module.mask.tolist() == [[float("-inf")] * 2] * 2


def test_what_on_step_does_to_a_buffer_stays() -> None:
    def make() -> Program:
        module = Counting()
        return program(module, on_step=lambda gradients, step: module.mean.fill_(step))

    assert trained(make).program.model[1].mean.tolist() == [3.0] * 3


def test_a_buffer_that_changes_its_shape_is_named() -> None:
    class Growing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.seen = torch.zeros(len(self.seen) + 1)
            return x

    with pytest.raises(
        InvalidArgumentError, match=r"model='1\.seen': this buffer has changed its shape.*persistent=False"
    ):
        train([Member(program(Growing()))], 1)


class OwnNorm(torch.nn.Module):
    """Calls the kernel of BatchNorm by itself, which writes statistics without counting up their versions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("running_var", torch.ones(3))

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.batch_norm(x, self.running_mean, self.running_var, training=True)


def test_statistics_that_a_kernel_writes_unseen_are_those_of_batch_norm() -> None:
    own, norm = trained(lambda: program(OwnNorm())), trained(lambda: program(NORM(3)))
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(own.program.model[1], name), getattr(norm.program.model[1], name)), name


def test_an_evaluation_that_is_not_seen_leaves_no_trace() -> None:
    quiet, noisy = Member(program(OwnNorm())), Member(program(OwnNorm()))
    for _ in range(3):
        noisy.program.model(rows(range(8))[0] * 5)
        train([quiet], 1)
        train([noisy], 1)
    assert quiet.leaves() == noisy.leaves()


class Tallying(torch.nn.Module):
    """Counts its calls in `start`, from a number that float32 does not have, through `.data`."""

    def __init__(self, start: Any) -> None:
        super().__init__()
        self.register_buffer("count", start)

    def forward(self, x: Any) -> Any:
        self.count.data += 1
        return x


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_large_counters_lose_nothing(kind: Any) -> None:
    member = trained(lambda: program(Tallying(torch.tensor((1 << 24) + 1, dtype=kind))))
    assert member.program.model[1].count.item() == (1 << 24) + 4


def test_a_buffer_of_two_modules_moves_once() -> None:
    def make() -> Program:
        first, second = Tallying(torch.tensor(0)), Tallying(torch.tensor(0))
        second.count = first.count
        return program(torch.nn.Sequential(first, second))

    first, second = trained(make).program.model[1]
    assert first.count is second.count
    assert first.count.item() == 6  # each of three steps is two calls


class Observer(torch.nn.Module):
    """Starts at infinity, as those of quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor([float("inf"), 0.0]))

    def forward(self, x: Any) -> Any:
        self.least[0] = torch.minimum(self.least[0], x.detach().min())
        return x


def test_a_buffer_that_leaves_infinity_is_named_and_one_that_has_left_it_is_averaged() -> None:
    with pytest.raises(InvalidArgumentError, match=r"model='1\.least': .*infinite.*compute a batch before"):
        train([Member(program(Observer()))], 1)

    def make() -> Program:
        made = program(Observer())
        made.model(rows(range(40))[0])
        return made

    assert torch.isfinite(trained(make).program.model[1].least).all()
