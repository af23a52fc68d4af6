"""What follows from a sealed step: the scaler, schedules, skipped steps, and what a program may do in `on_step`."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from ringfort.errors import InvalidArgumentError
from ringfort.torch.training.run import elastic
from ringfort.torch.training.update import Update, squared_norm
from tests.helpers.torch_members import Member, Program, loss_of_rows, plain_train, train


def scaled(bad: dict[int, float], **options: Any) -> Program:
    """A program with a scaler, whose loss has a factor in some steps."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def loss(model: Any, indices: Any, step: int) -> Any:
        return loss_of_rows(model, indices, step) * bad.get(step, 1.0)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    given = {"scaler": scaler, "clip_norm": 0.5, "scheduler": schedule, **options}
    return Program(model, optimizer, loss, options=given)


def test_the_scale_grows_and_backs_off_as_that_of_torch_does() -> None:
    members = [Member(scaled({3: inf, 4: nan})) for _ in range(2)]
    scales = list[float]()
    for _ in range(7):
        before = members[0].program.model[0].weight.clone()
        done = train(members, 1)[0]
        scales.append(members[0].program.options["scaler"].get_scale())
        is_same = torch.equal(before, members[0].program.model[0].weight)
        assert is_same == (not done.is_finite) == (done.result.step in (3, 4))
        assert members[0].leaves() == members[1].leaves()
    reference = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, expected = torch.optim.SGD([weight], lr=0.1), list[float]()
    for step in range(1, 8):
        reference.scale((weight * {3: inf, 4: nan}.get(step, 1.0)).sum()).backward()
        reference.step(optimizer)
        reference.update()
        optimizer.zero_grad()
        expected.append(reference.get_scale())
    assert scales == expected == [1024.0, 2048.0, 1024.0, 512.0, 512.0, 1024.0, 1024.0]
    assert members[0].program.options["scheduler"].last_epoch == 5  # it follows the optimizer


def test_a_machine_that_joins_has_the_scale_and_the_statistics() -> None:
    members = [Member(scaled({2: inf})) for _ in range(2)]
    train(members, 3)
    late = Member(scaled({2: inf}))
    late.join(members[0])
    assert late.program.options["scaler"].state_dict() == members[0].program.options["scaler"].state_dict()
    members.append(late)
    train(members, 2)
    assert late.leaves() == members[0].leaves() == members[1].leaves()


def test_a_scaled_run_computes_what_an_unscaled_one_does() -> None:
    one, other = Member(scaled({})), scaled({})
    other.options["scaler"] = None
    other = Member(other)
    train([one], 4)
    train([other], 4)
    for mine, theirs in zip(
        one.program.model.state_dict().values(), other.program.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_disabled_scaler_scales_nothing() -> None:
    member = Member(scaled({}, scaler=torch.amp.GradScaler("cpu", enabled=False)))
    train([member], 2)
    assert member.program.options["scaler"].state_dict() == {}


def test_on_step_is_called_for_skipped_steps_too_and_a_schedule_per_pass_goes_on() -> None:
    """So `if step == 3` in a program happens, whatever the scaler does."""
    calls = list[tuple[int, int]]()
    on_step: Any = lambda gradients, step: calls.append((step, len(gradients)))  # noqa: E731
    member = Member(scaled({3: inf}, on_step=on_step, scheduler_per="pass"))
    train([member], 4)
    assert calls == [(1, 6), (2, 6), (3, 0), (4, 6)]
    assert member.program.options["scheduler"].last_epoch == 1  # step 3 ends a pass


def test_gradients_in_on_step_are_those_of_the_whole_batch_after_clipping() -> None:
    found = list[dict[str, Any]]()

    def keep(gradients: dict[str, Any], step: int) -> None:
        found.append({name: gradient.clone() for name, gradient in gradients.items()})

    def make() -> Program:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1)
        return Program(model, torch.optim.SGD(model.parameters(), lr=0.1), options={"clip_norm": 0.05, "on_step": keep})

    plain_train(make(), 1)
    train([Member(make())], 1)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-7)
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in found[1].values()]))
    assert norm.item() == pytest.approx(0.05, rel=1e-4)


def test_on_step_may_change_gradients() -> None:
    def make() -> Program:
        model = torch.nn.Linear(4, 1)

        def on_step(gradients: dict[str, Any], step: int) -> None:
            for gradient in gradients.values():
                gradient.zero_()

        return Program(model, torch.optim.SGD(model.parameters(), lr=0.1), options={"on_step": on_step})

    train([Member(make())], 2)  # which checks that the result stays whole


def test_a_step_without_any_weight_changes_nothing() -> None:
    model = torch.nn.Linear(4, 1)
    program = Program(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5), weight=lambda indices: 0.0)
    before = model.weight.clone()
    assert train([Member(program)], 1)[0].is_empty
    assert torch.equal(model.weight, before)


def test_the_optimizer_belongs_to_the_run_until_it_is_closed_or_another_run_has_it() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = elastic(model, optimizer, batch=4)
    with pytest.raises(InvalidArgumentError, match=r"call run.step\(\) instead"):
        optimizer.step()
    program = Program(model, optimizer, lambda model, indices, step: model(torch.ones(len(indices), 2)).mean())
    train([Member(program)], 1)  # another run of the same program, such as a cell of a notebook that runs again
    first.close()
    second = elastic(model, optimizer, batch=4)
    second.close()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    optimizer.step()


def test_a_device_on_which_no_parameter_was_used_has_nothing_to_clip() -> None:
    Update._clip([None, None], 1.0)
    gradient = torch.full((4,), 2.0)
    Update._clip([None, gradient], 1.0)
    torch.testing.assert_close(gradient, torch.full((4,), 0.5))


@pytest.mark.parametrize("size", [0, 5, 4096, 3 * 256 * 4096 + 4097])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_norm_has_the_same_bits_with_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, size: int, kind: Any
) -> None:
    array, found = np.random.default_rng(size).standard_normal(size).astype(kind), set[float]()
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        found.add(squared_norm(array))
    assert len(found) == 1
    assert found.pop() == pytest.approx(float(np.square(array, dtype=np.float64).sum()), rel=1e-6)


def test_gradients_may_be_clipped_by_value_before_the_optimizer_steps() -> None:
    """In place, although gradients may be lent from a result that other members still need."""

    def clipped() -> Program:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(
            lambda *_: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        )  # fmt: skip
        return Program(model, optimizer)

    plain, members = clipped(), [Member(clipped()) for _ in range(2)]
    lent: list[Any] = []
    for member in members:
        member.run._update.lend = lent.append
    plain_train(plain, 3)
    train(members, 3)
    assert not lent
    for mine, theirs in zip(plain.model.parameters(), members[1].program.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
