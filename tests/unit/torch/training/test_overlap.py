"""Gradients that are reduced while torch computes the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch")

import torch

from ringfort.config import DistributedConfig
from ringfort.context import DistributedContext
from ringfort.errors import DistributedError, InvalidArgumentError
from ringfort.testing import results, run_ranks, simulated_group
from ringfort.testing.groups import closing_all
from ringfort.torch.training import tensor_sum
from tests.helpers.torch_members import DATA, Member, Program, loss_of_rows, train


@pytest.fixture(autouse=True)
def small_buckets() -> Iterator[None]:
    with patch.object(tensor_sum, "BUCKET", 64):
        yield


def program(**options: Any) -> Program:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(4, 4) for _ in range(4)), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )
    return Program(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), options=options)


@contextmanager
def contexts(size: int) -> Iterator[list[DistributedContext]]:
    with (
        simulated_group(size, DistributedConfig()) as group,
        closing_all([DistributedContext(backend) for backend in group]) as made,
    ):
        yield list(made)


def step(members: list[Member], group: list[DistributedContext]) -> None:
    """Take a step whose last micro-batches are reduced while they are computed."""
    for rank, (member, context) in enumerate(zip(members, group, strict=True)):
        member.compute([rank, 2 + rank] if member.cursor % DATA.samples < 32 else [rank], context)
    done = results(run_ranks(list(zip(members, group, strict=True)), lambda one: one[0].reduce(one[1])))
    for member, one in zip(members, done, strict=True):
        member.apply(one)


def test_it_gives_the_same_bits_as_a_reduction_at_the_end() -> None:
    overlapping = [Member(program()) for _ in range(2)]
    others = [Member(program(overlap=False)) for _ in range(2)]
    for members in (overlapping, others):
        with contexts(2) as group:
            for _ in range(3):
                step(members, group)
    assert len(overlapping[0].sums._buckets) > 4
    assert overlapping[0].leaves() == overlapping[1].leaves() == others[0].leaves()


def test_a_group_that_fails_meanwhile_does_not_disturb_the_program() -> None:
    """The program learns of it when it ends the micro-batch, and the run computes nothing again."""
    member, calm = Member(program()), Member(program())
    with contexts(2) as (mine, other):
        other.close()
        mine.close()
        member.compute(range(4), mine)
        with pytest.raises(DistributedError):
            member.reduce(mine)
    member.sums.forget()
    with contexts(1) as [alone]:
        member.apply(member.reduce(alone))
    train([calm], 1)
    assert member.leaves() == calm.leaves()


def test_two_gradients_of_one_weight_are_noticed_in_time(caplog: pytest.LogCaptureFixture) -> None:
    """The first step of an epoch is never overlapped, so nothing has gone wrong when this is noticed."""

    def twice() -> Program:
        found = program()

        def loss(model: Any, indices: Any, number: int) -> Any:
            loss_of_rows(model, indices, number).mul(0.5).backward()
            return loss_of_rows(model, indices, number) * 0.5

        found.loss = loss
        return found

    member = Member(twice())
    with caplog.at_level("INFO", "ringfort"):
        train([member], 1)
        with contexts(1) as group:
            step([member], group)
    assert "gets several gradients per batch, so overlap=False holds" in caplog.text
    late = Member(twice())
    with contexts(1) as [alone]:
        late.sums.expect(alone)
        with pytest.raises(InvalidArgumentError, match=r"two gradients for one batch.*overlap=False"):
            late.compute([0], alone)


def test_gradients_of_a_failed_backward_are_not_used() -> None:
    member = Member(program())
    model = member.program.model
    model[0].weight.register_hook(lambda gradient: 1 / 0)
    sums = member.sums
    sums.clear()
    sums.open(1.0)
    with pytest.raises(ZeroDivisionError):
        sums.backward(loss_of_rows(model, [1, 2], 1), 1.0, lambda loss: loss)
    for _ in range(2):
        with pytest.raises(
            InvalidArgumentError, match="failed with ZeroDivisionError, so the gradients of this batch are"
        ):
            sums.end()
