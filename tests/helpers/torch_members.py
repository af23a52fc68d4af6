"""Members of an elastic run of a torch model in one process, without a cluster: the real sums, updates and states, over
a group in memory. What they do is compared with a plain loop of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ringfort.config import DistributedConfig
from ringfort.context import DistributedContext
from ringfort.testing import results, run_ranks, simulated_group
from ringfort.torch.training.run import TorchRun, elastic
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.exchange import SUMS, inspect
from ringfort.training.elastic.protocol import Result
from ringfort.training.elastic.state_check import leaves_of
from ringfort.training.elastic.step import Done

DATA = Data(samples=40, batch=16, microbatch=4, seed=3)
"""Steps of 16, 16 and 8 samples."""
Loss = Callable[[Any, Any, int], Any]


def loss_of_rows(model: Any, indices: Any, step: int) -> Any:
    """The loss of most programs here: rows of four numbers, and a target that is not linear."""
    x, y = rows(indices)
    return ((model(x).double() - y) ** 2).mean().float()


def rows(indices: Any) -> tuple[Any, Any]:
    """Return inputs and targets of samples."""
    numbers = torch.as_tensor(np.asarray(indices), dtype=torch.float32)
    x = torch.stack([torch.sin(numbers * factor) for factor in (1.0, 0.7, 0.31, 0.11)], 1)
    return x, (x[:, :1] * x[:, 1:2] + 0.5).double()


@dataclass
class Program:
    """What a program makes before its loop, and how it computes the loss of some samples."""

    model: Any
    optimizer: Any
    loss: Loss = loss_of_rows
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    weight: Callable[[Any], float] | None = None
    """The weight of samples, if it is not their number."""
    backward: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options of `backward`."""


class Member:
    """One member of the run."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.run: TorchRun = elastic(program.model, program.optimizer, batch=DATA.batch, **program.options)
        self.step, self.cursor = 0, 0

    @property
    def sums(self) -> Any:
        return self.run._sums

    def compute(self, parts: Sequence[int], overlap: DistributedContext | None = None) -> None:
        """Compute micro-batches of the next step; the last one is reduced over `overlap` meanwhile."""
        span = DATA.span(self.cursor)
        self.sums.clear()
        for part in parts:
            if overlap is not None and part == parts[-1]:
                self.sums.expect(overlap)
            indices = DATA.part(span, part)
            count = len(indices) if self.program.weight is None else self.program.weight(indices)
            self.sums.open(len(indices) / span.unit)
            loss = self.program.loss(self.program.model, indices, self.step + 1)
            self.sums.backward(loss, count / span.unit, self.run._update.scaled, **self.program.backward)
            self.sums.end()

    def reduce(self, context: DistributedContext) -> Done:
        """Seal the step."""
        payload = self.sums.reduce(context)
        payload[SUMS] = context.all_reduce(np.array([self.sums.count, self.sums.loss]))
        result = Result("branch", self.step + 1, self.cursor + DATA.span(self.cursor).samples, payload)
        weight, loss = payload[SUMS].tolist()
        return Done(result, weight, loss, inspect(result, 0, 1)[1])

    def apply(self, done: Done) -> None:
        """Apply a sealed step. Others may still need the result."""
        before = inspect(done.result, 0, 1)
        self.run._update.apply(done, ends_pass=done.result.cursor % DATA.samples == 0)
        assert inspect(done.result, 0, 1) == before, "the result was changed"
        self.step, self.cursor = done.result.step, done.result.cursor

    def join(self, other: Member) -> None:
        """Take over the state of another member."""
        self.run.state.load(other.run.state.image())
        self.step, self.cursor = other.step, other.cursor

    def leaves(self) -> dict[str, int]:
        """Return the digests of all parts of the state."""
        return leaves_of("", self.run.state).digests


def train(members: Sequence[Member], steps: int) -> list[Done]:
    """Take part in so many steps, all members at once. Return what was sealed."""
    with ExitStack() as stack:
        group = stack.enter_context(simulated_group(len(members), DistributedConfig()))
        contexts = [stack.enter_context(DistributedContext(backend)) for backend in group]
        sealed = list[Done]()
        for _ in range(steps):
            parts = range(DATA.parts(DATA.span(members[0].cursor)))
            for rank, member in enumerate(members):
                member.compute(parts[rank :: len(members)])
            ranks = list(zip(members, contexts, strict=True))
            done = results(run_ranks(ranks, lambda one: one[0].reduce(one[1])))
            for member, one in zip(members, done, strict=True):
                member.apply(one)
            sealed.append(done[0])
        return sealed


def plain_train(program: Program, steps: int, *, step: int = 0, cursor: int = 0) -> list[float]:
    """Do the same in a plain loop with gradient accumulation. Return the mean losses."""
    model, optimizer, options, losses = program.model, program.optimizer, program.options, list[float]()
    scheduler = options.get("scheduler")
    for number in range(step + 1, step + steps + 1):
        span = DATA.span(cursor)
        cursor += span.samples
        parts = [DATA.part(span, index) for index in range(DATA.parts(span))]
        counts = [len(part) if program.weight is None else program.weight(part) for part in parts]
        optimizer.zero_grad()
        losses.append(0.0)
        for part, count in zip(parts, counts, strict=True):
            if count:
                loss = program.loss(model, part, number) * (count / sum(counts))
                loss.backward(**program.backward)
                losses[-1] += float(loss.detach())
        if options.get("clip_norm") is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
        named = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        optimizer.step()
        if options.get("on_step") is not None:
            options["on_step"](named, number)
        if scheduler is not None and (options.get("scheduler_per") != "pass" or cursor % DATA.samples == 0):
            for one in scheduler if isinstance(scheduler, list) else [scheduler]:
                one.step()
    return losses
