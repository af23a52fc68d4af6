"""What only the run may change: a loop that changes it is told, because other machines do not run that loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from ringfort.errors import InvalidArgumentError
from tests.helpers.torch_members import Member, Program, train


def program(*, passes_scheduler: bool, **options: Any) -> tuple[Program, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    given = {"scheduler": scheduler} if passes_scheduler else {}
    return Program(model, optimizer, options={**given, **options}), scheduler


def halve(weight: Any) -> None:
    with torch.no_grad():
        weight *= 0.5


CHANGES: dict[str, tuple[Callable[[Program, Any], object], bool, str]] = {
    "a scheduler of the run": (lambda _, one: one.step(), True, r"scheduler\[0\].*take scheduler.step\(\) out of"),
    "another scheduler": (lambda _, one: one.step(), False, r"\['lr'\].*pass the scheduler to elastic\(scheduler=\)"),
    "a rate": (
        lambda made, _: made.optimizer.param_groups[0].update(lr=0.3),
        True,
        r"optimizer\.param_groups\[0\]\['lr'\].*change it in on_step=",
    ),
    "a momentum": (lambda made, _: made.optimizer.param_groups[0].update(momentum=0.3), True, r"\['momentum'\]"),
    "a weight": (lambda made, _: halve(made.model[0].weight), True, r"model\['0\.weight'\].*change it in on_step="),
    "weights": (lambda made, _: made.model.load_state_dict(made.model.state_dict()), True, r"model\['0\.weight'\]"),
    "frozen": (lambda made, _: made.model[1].requires_grad_(False), True, r"model\['1\.weight'\]"),
}


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("what", CHANGES)
def test_a_loop_that_changes_what_belongs_to_the_run_is_told(what: str) -> None:
    change, passes_scheduler, words = CHANGES[what]
    made, scheduler = program(passes_scheduler=passes_scheduler)
    member = Member(made)
    train([member], 2)
    member.run._update.guard.check()
    change(made, scheduler)
    with pytest.raises(InvalidArgumentError, match=words):
        member.run._update.guard.check()  # as run.step() does
    with pytest.raises(InvalidArgumentError, match=words):
        train([member], 1)  # a member that had no part in the step applies it all the same


def test_a_model_that_writes_into_its_weights_while_it_computes_is_told() -> None:
    model = torch.nn.Embedding(40, 3, max_norm=0.1)
    member = Member(
        Program(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda model, indices, step: model(torch.as_tensor(indices)).square().mean(),
        )
    )
    member.run._update.guard.begin()
    with pytest.raises(InvalidArgumentError, match=r"model\['weight'\]"):
        train([member], 1)


def test_before_the_loop_in_on_step_and_by_a_machine_that_joins_all_may_be_changed() -> None:
    def make() -> Program:
        def on_step(gradients: dict[str, Any], step: int) -> None:
            made.optimizer.param_groups[0]["momentum"] = 0.1 * step
            halve(made.model[0].weight)

        made, _ = program(passes_scheduler=True, on_step=on_step)
        return made

    members = [Member(make()) for _ in range(2)]
    members[0].program.optimizer.param_groups[0]["lr"] = 0.3
    members[0].run._update.guard.begin()
    members[1].join(members[0])
    train(members, 3)
    late = Member(make())
    late.run._update.guard.begin()
    late.join(members[0])
    members.append(late)
    train(members, 2)
    assert late.leaves() == members[0].leaves() == members[1].leaves()


@pytest.mark.parametrize("keep", [lambda one: one, lambda one: {"inner": [one[:1]]}])
def test_a_gradient_that_on_step_keeps_must_be_cloned(keep: Callable[[Any], Any]) -> None:
    def make(*, clones: bool) -> Program:
        kept: dict[str, Any] = {"last": keep(torch.zeros(3, 4))}

        def on_step(gradients: dict[str, Any], step: int) -> None:
            gradient = gradients["0.weight"]
            kept["last"] = keep(gradient.clone() if clones else gradient)

        return program(passes_scheduler=True, state=kept, on_step=on_step)[0]

    train([Member(make(clones=True))], 2)
    with pytest.raises(InvalidArgumentError, match=r"state\['last'\].*keep gradient\.clone\(\)"):
        train([Member(make(clones=False))], 1)
