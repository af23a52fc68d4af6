"""Programs of every kind as members of a run: they compute what a plain loop of torch computes, and a machine that
joins continues with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from ringfort.torch.training.model_state import _moved_to
from tests.helpers.torch_members import Member, Program, loss_of_rows, plain_train, rows, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]


def small(*extra: Any) -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), *extra, torch.nn.Tanh(), torch.nn.Linear(6, 1))


def sgd(model: Any, **options: Any) -> Any:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def with_optimizer(kind: Any, **options: Any) -> Callable[[], Program]:
    def make() -> Program:
        model = small()
        return Program(model, kind(model.parameters(), **{"lr": 0.01, **options}))

    return make


def with_scheduler(kind: Callable[[Any], Any], **options: Any) -> Callable[[], Program]:
    def make() -> Program:
        model = small()
        optimizer = sgd(model)
        return Program(model, optimizer, options={"scheduler": kind(optimizer), **options})

    return make


def in_type(kind: Any) -> Callable[[], Program]:
    def make() -> Program:
        model = small().to(kind)

        def loss(model: Any, indices: Any, step: int) -> Any:
            x, y = rows(indices)
            return ((model(x.to(kind)) - y.to(kind)) ** 2).mean()

        return Program(model, sgd(model), loss)

    return make


def weighted() -> Program:
    model = small()
    return Program(model, sgd(model), weight=lambda indices: float(sum(indices % 5 + 1)))


def some_without_weight() -> Program:
    model = small()

    def loss(model: Any, indices: Any, step: int) -> Any:
        is_padding = bool(indices[0] % 3 == 0)
        return loss_of_rows(model, indices[:0] if is_padding else indices, step)  # the mean over nothing is NaN

    return Program(model, sgd(model), loss, weight=lambda indices: 0.0 if indices[0] % 3 == 0 else float(len(indices)))


def clipped() -> Program:
    model = small()
    return Program(model, sgd(model), options={"clip_norm": 0.05})


def hardly_clipped() -> Program:
    model = small()
    return Program(model, sgd(model), options={"clip_norm": 50.0})


def groups() -> Program:
    model = small()
    options = [
        {"params": model[0].parameters(), "lr": 0.02, "betas": (0.8, 0.99)},
        {"params": [model[2].bias], "weight_decay": 0.1},
        {"params": [model[2].weight], "eps": 1e-6},
    ]
    return Program(model, torch.optim.AdamW(options, lr=0.01))


def a_group_added_later() -> Program:
    model = small()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01)

    def on_step(gradients: dict[str, Any], step: int) -> None:
        if step == 2:
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})

    return Program(model, optimizer, options={"on_step": on_step})


def named_group_added_later() -> Program:
    model = small()
    optimizer = torch.optim.AdamW(model[0].named_parameters(), lr=0.01)

    def on_step(gradients: dict[str, Any], step: int) -> None:
        if step == 2:
            optimizer.add_param_group({"params": [("last", model[2].weight)], "lr": 0.5})

    return Program(model, optimizer, options={"on_step": on_step})


def unfrozen_later() -> Program:
    model = small()
    model[0].requires_grad_(False)

    def on_step(gradients: dict[str, Any], step: int) -> None:
        if step == 2:
            model[0].requires_grad_(True)

    return Program(model, sgd(model), options={"on_step": on_step})


def frozen_later() -> Program:
    model = small()

    def on_step(gradients: dict[str, Any], step: int) -> None:
        if step == 2:
            model[0].requires_grad_(False)

    return Program(model, sgd(model), options={"on_step": on_step})


class Branches(torch.nn.Module):
    """Uses one of its layers for some samples only, and one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.always = torch.nn.Linear(4, 1)
        self.sometimes = torch.nn.Linear(4, 1)
        self.never = torch.nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        found = self.always(x)
        return found + self.sometimes(x) if x[0, 0] > 0.5 else found


def unused() -> Program:
    model = Branches()
    return Program(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5))


class Tied(torch.nn.Module):
    """An embedding whose weights are those of the output too."""

    def __init__(self, *, sparse: bool = False, is_tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(40, 4, sparse=sparse)
        self.output = torch.nn.Linear(4, 40, bias=False)
        if is_tied:
            self.output.weight = self.embedding.weight

    def forward(self, indices: Any) -> Any:
        return self.output(torch.tanh(self.embedding(indices)))


def loss_of_words(model: Any, indices: Any, step: int) -> Any:
    words = torch.as_tensor(indices)
    return torch.nn.functional.cross_entropy(model(words), (words * 7) % 40)


def tied() -> Program:
    model = Tied()
    return Program(model, torch.optim.AdamW(model.parameters(), lr=0.05), loss_of_words)


def sparse() -> Program:
    model = Tied(sparse=True, is_tied=False)
    return Program(model, torch.optim.SGD(model.parameters(), lr=0.5), loss_of_words)


def mixed_types() -> Program:
    model = small()
    model[0].to(torch.bfloat16)
    model[2].to(torch.float64)

    def loss(model: Any, indices: Any, step: int) -> Any:
        x, y = rows(indices)
        return ((model[2](model[1](model[0](x.bfloat16())).double()) - y) ** 2).mean()

    return Program(model, sgd(model), loss)


class Images(torch.nn.Module):
    """Convolutions in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Conv2d(2, 3, 3)
        self.second = torch.nn.Conv2d(3, 2, 2)

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.first(x))).mean((1, 2, 3), keepdim=False)[:, None]


def loss_of_images(model: Any, indices: Any, step: int) -> Any:
    x, y = rows(indices)
    images = (x[:, :2, None, None] * torch.arange(16.0).reshape(4, 4)).contiguous(memory_format=torch.channels_last)
    return ((model(images) - y.float()) ** 2).mean()


def channels_last(**options: Any) -> Callable[[], Program]:
    def make() -> Program:
        model = Images().to(memory_format=torch.channels_last)
        return Program(model, torch.optim.AdamW(model.parameters(), lr=0.01, **options), loss_of_images)

    return make


def recomputed(*, use_reentrant: bool) -> Callable[[], Program]:
    def make() -> Program:
        model = small()

        def loss(model: Any, indices: Any, step: int) -> Any:
            x, y = rows(indices)
            x.requires_grad_()
            inner = checkpoint(model[:2], x, use_reentrant=use_reentrant)
            return ((model[2](inner) - y.float()) ** 2).mean()

        return Program(model, sgd(model), loss)

    return make


def two_gradients_of_one_weight() -> Program:
    """With reentrant checkpoints a weight that is used twice gets two gradients."""
    model = small()

    def loss(model: Any, indices: Any, step: int) -> Any:
        x, y = rows(indices)
        x.requires_grad_()
        found = sum(checkpoint(model, x * factor, use_reentrant=True) for factor in (1.0, 0.5))
        return ((found - y.float()) ** 2).mean()

    return Program(model, sgd(model), loss)


def gradient_penalty() -> Program:
    model = small()

    def loss(model: Any, indices: Any, step: int) -> Any:
        x, _ = rows(indices)
        x.requires_grad_()
        found = loss_of_rows(model, indices, step)
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        return found + (slope**2).mean()

    return Program(model, sgd(model), loss)


def graph_of_gradients() -> Program:
    model = small()
    return Program(model, sgd(model), backward={"create_graph": True})


def own_hooks() -> Program:
    model = small()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    model[2].register_full_backward_hook(lambda module, inner, outer: tuple(x * 0.5 for x in inner))
    return Program(model, sgd(model))


def averaged() -> Program:
    model = small()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    program = Program(model, sgd(model))
    program.options = {"state": {"ema": average}, "on_step": lambda gradients, step: average.update_parameters(model)}
    return program


def own_state() -> Program:
    model = small()
    plateau_of = sgd(model)
    plateau = lr_scheduler.ReduceLROnPlateau(plateau_of, patience=1, factor=0.5)
    state: dict[str, Any] = {"best": 1e9, "norms": [], "plateau": plateau, "total": torch.zeros(3), "where": {"x": 1}}

    def on_step(gradients: dict[str, Any], step: int) -> None:
        state["norms"].append(float(gradients["0.weight"].norm()))
        state["best"] = min(state["best"], state["norms"][-1])
        state["total"] += gradients["0.bias"][:3]
        state["where"][f"step {step}"] = [step, None, "text"]
        plateau.step(state["norms"][-1])

    return Program(model, plateau_of, options={"state": state, "on_step": on_step})


PROGRAMS: dict[str, Callable[[], Program]] = {
    "weights": weighted,
    "some without weight": some_without_weight,
    "clipped": clipped,
    "hardly clipped": hardly_clipped,
    "groups": groups,
    "a group added later": a_group_added_later,
    "a named group added later": named_group_added_later,
    "unfrozen later": unfrozen_later,
    "frozen later": frozen_later,
    "unused": unused,
    "tied": tied,
    "sparse": sparse,
    "bfloat16": in_type(torch.bfloat16),
    "float16": in_type(torch.float16),
    "float64": in_type(torch.float64),
    "mixed types": mixed_types,
    "channels last": channels_last(),
    "channels last, fused": channels_last(fused=True),
    "recomputed": recomputed(use_reentrant=False),
    "recomputed, reentrant": recomputed(use_reentrant=True),
    "two gradients": two_gradients_of_one_weight,
    "gradient penalty": gradient_penalty,
    "graph of gradients": graph_of_gradients,
    "own hooks": own_hooks,
    "average of weights": averaged,
    "own state": own_state,
    "SGD": with_optimizer(torch.optim.SGD),
    "SGD with Nesterov": with_optimizer(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD with Nesterov, foreach": with_optimizer(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": with_optimizer(torch.optim.SGD, momentum=0.9, fused=True),
    "Adam amsgrad": with_optimizer(torch.optim.Adam, amsgrad=True),
    "AdamW foreach": with_optimizer(torch.optim.AdamW, foreach=True),
    "AdamW fused": with_optimizer(torch.optim.AdamW, fused=True),
    "AdamW with a tensor as rate": with_optimizer(torch.optim.AdamW, lr=torch.tensor(0.01), fused=True),
    "Adagrad": with_optimizer(torch.optim.Adagrad),
    "RMSprop": with_optimizer(torch.optim.RMSprop, momentum=0.5, centered=True),
    "RAdam": with_optimizer(torch.optim.RAdam),
    "NAdam": with_optimizer(torch.optim.NAdam),
    "Adamax": with_optimizer(torch.optim.Adamax),
    "ASGD": with_optimizer(torch.optim.ASGD),
    "Rprop": with_optimizer(torch.optim.Rprop),
    "Rprop foreach": with_optimizer(torch.optim.Rprop, foreach=True),
    "Adafactor": with_optimizer(torch.optim.Adafactor),
    "Adadelta": with_optimizer(torch.optim.Adadelta),
    "StepLR": with_scheduler(lambda one: lr_scheduler.StepLR(one, 2, 0.5)),
    "MultiStepLR": with_scheduler(lambda one: lr_scheduler.MultiStepLR(one, [2, 4, 4], 0.5)),
    "CosineAnnealingLR": with_scheduler(lambda one: lr_scheduler.CosineAnnealingLR(one, 5)),
    "CosineAnnealingWarmRestarts": with_scheduler(lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 2)),
    "OneCycleLR": with_scheduler(lambda one: lr_scheduler.OneCycleLR(one, 0.5, total_steps=9)),
    "CyclicLR": with_scheduler(lambda one: lr_scheduler.CyclicLR(one, 0.01, 0.5, 2)),
    "LambdaLR": with_scheduler(lambda one: lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step))),
    "SequentialLR": with_scheduler(
        lambda one: lr_scheduler.SequentialLR(
            one, [lr_scheduler.LinearLR(one, 0.1, total_iters=3), lr_scheduler.ExponentialLR(one, 0.5)], [3]
        )
    ),
    "ChainedScheduler": with_scheduler(
        lambda one: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(one, 0.5, 3), lr_scheduler.ExponentialLR(one, 0.9)]
        )
    ),
    "two schedulers": with_scheduler(
        lambda one: [lr_scheduler.ExponentialLR(one, 0.9), lr_scheduler.StepLR(one, 2, 0.5)]
    ),
    "scheduler per pass": with_scheduler(lambda one: lr_scheduler.StepLR(one, 1, 0.5), scheduler_per="pass"),
}
IN_OTHER_TYPES = {"bfloat16": 4e-3, "float16": 4e-3, "mixed types": 4e-3}
"""The largest differences where torch adds up gradients in 16 bits, which a run does not."""


def check_like(mine: Any, plain: Any, most: float) -> None:
    for (name, ours), (_, theirs) in zip(mine.state_dict().items(), plain.state_dict().items(), strict=True):
        difference = (ours.double() - theirs.double()).abs().max().item()
        assert difference <= most, f"{name} differs by {difference}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_members_compute_what_a_plain_loop_does_and_one_that_joins_continues(name: str) -> None:
    make, most = PROGRAMS[name], IN_OTHER_TYPES.get(name, 1e-6)
    plain = make()
    losses = plain_train(plain, 6)
    members = [Member(make()) for _ in range(2)]
    found = train(members, 4)
    late = Member(make())
    late.join(members[1])
    assert late.leaves() == members[0].leaves() == members[1].leaves()
    members.append(late)
    found += train(members, 2)
    for member in members:
        assert member.leaves() == members[0].leaves()
        check_like(member.program.model, plain.model, most)
        for key, value in plain.options.get("state", {}).items():
            if isinstance(value, torch.nn.Module):
                check_like(member.program.options["state"][key], value, most)
        groups = zip(member.program.optimizer.param_groups, plain.optimizer.param_groups, strict=True)
        for ours, theirs in groups:
            assert float(ours["lr"]) == pytest.approx(float(theirs["lr"]), rel=1e-12)
            assert len(ours["params"]) == len(theirs["params"])
    assert [done.loss / done.weight for done in found] == pytest.approx(losses, rel=max(most, 1e-5))


def test_the_state_of_another_program_is_refused_and_named() -> None:
    one = Member(with_optimizer(torch.optim.SGD)())

    def other(*layers: Any) -> Callable[[], Program]:
        model = torch.nn.Sequential(*layers)
        return lambda: Program(model, torch.optim.SGD(model.parameters(), lr=0.01))

    first, last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)
    others = {
        "['groups'][0]['dampening'] is a plain value here and missing there": with_optimizer(torch.optim.AdamW),
        "['0.bias'] is float32(6,) here and float32(8,) there": other(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)),
        "['1.bias'] is missing here": other(first, torch.nn.BatchNorm1d(6), last),
    }
    before = one.leaves()
    for why, make in others.items():
        manifest = Member(make()).run.state.manifest()
        assert why in one.run.state.misfit(manifest), one.run.state.misfit(manifest)
    assert one.leaves() == before


def test_names_in_an_optimizer_follow_its_parameters() -> None:
    members = [Member(named_group_added_later()) for _ in range(2)]
    train(members[:1], 3)
    members[1].join(members[0])
    groups = members[1].program.optimizer.param_groups
    assert [group["param_names"] for group in groups] == [["weight", "bias"], ["2.weight"]]
    first = groups[0]["params"]
    groups[0]["params"] = first[::-1]  # as a program does that prunes or sorts
    groups[0]["param_names"] = ["bias", "weight"]
    members[1].join(members[0])
    assert (groups[0]["params"], groups[0]["param_names"]) == (first, ["weight", "bias"])


def test_what_an_optimizer_keeps_goes_to_the_device_however_deep_it_lies() -> None:
    parameter = torch.empty(3, device="meta")
    made = {"step": torch.zeros(()), "moments": [torch.zeros(3), {"scale": (torch.zeros(1), 2.0)}]}
    found = _moved_to(parameter, made, moves_step=False)
    assert found["step"].device.type == "cpu"
    assert found["moments"][0].device.type == found["moments"][1]["scale"][0].device.type == "meta"
    assert found["moments"][1]["scale"][1] == 2.0
    assert _moved_to(parameter, {"step": torch.zeros(())}, moves_step=True)["step"].device.type == "meta"
