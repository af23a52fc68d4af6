"""Local steps behind an optimizer, and the weights of a hook for DDP: what needs no group of processes."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from ringfort import DistributedContext, SimulatedBackend
from ringfort.errors import InvalidArgumentError

torch = pytest.importorskip("torch")

import ringfort.torch  # noqa: E402


@pytest.fixture
def context() -> Generator[DistributedContext]:
    (backend,) = SimulatedBackend.create_group(1)
    with DistributedContext(backend) as found:
        yield found


def stepped(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_parameter_that_is_added_unfrozen_or_frozen_later_is_refused(context: DistributedContext) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = ringfort.torch.local_steps(model, optimizer, ctx=context)
    stepped(model, optimizer)
    model[0].bias.requires_grad_(True)
    with pytest.raises(InvalidArgumentError, match="not averaged"):
        stepped(model, optimizer)
    model[0].bias.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    with pytest.raises(InvalidArgumentError, match=r"1\.bias.*frozen"):
        stepped(model, optimizer)
    model[1].bias.requires_grad_(True)
    stepped(model, optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(InvalidArgumentError, match="not averaged"):
        stepped(model, optimizer)
    assert local.samples == 2


def test_an_optimizer_of_another_module_is_refused(context: DistributedContext) -> None:
    model, other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(InvalidArgumentError, match="not averaged"):
        ringfort.torch.local_steps(model, optimizer, ctx=context)


def test_weights_are_added_up_where_the_backend_has_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL adds up tensors of a GPU alone."""
    sent = list[Any]()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_object_coll_device", lambda group: "meta")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, **_: sent.append(total))
    ringfort.torch.weighted_hook().begin(5)  # type: ignore[attr-defined]
    assert sent[0].device.type == "meta"
