"""What single processes do in tests of elastic runs on a GPU, which the members share here."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from ringfort.torch.training.run import elastic
from tests.helpers.torch_members import Member, Program, plain_train, rows, train
from tests.torch.elastic_scenarios import DATA, Net, Rows, settings, state_of, wait_for

CUDA = torch.device("cuda")


class Deep(torch.optim.SGD):
    """Keeps tensors deep in its state, from the first step on."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault("kept", {"inner": [torch.zeros_like(parameter)]})
                kept["inner"][0].add_(parameter.detach())  # fails if it is on another device
        return found


def program(kind: str) -> Program:
    """A program whose model is on the GPU."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).to(CUDA)
    options: dict[str, Any] = {"clip_norm": 0.05}
    if kind == "deep":
        optimizer: Any = Deep(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=kind == "fused")

    def loss(model: Any, indices: Any, step: int) -> Any:
        x, y = rows(indices)
        return ((model(x.to(CUDA)) - y.to(CUDA, torch.float32)) ** 2).mean()

    return Program(model, optimizer, loss, options=options)


def joins(rank: int, world_size: int, kind: str) -> float:
    """Members in one process, of which one joins later. Return the largest difference from a plain loop."""
    plain, members = program(kind), [Member(program(kind)) for _ in range(2)]
    plain_train(plain, 5)
    train(members, 3)
    members.append(Member(program(kind)))
    members[2].join(members[0])
    train(members, 2)
    assert members[0].leaves() == members[1].leaves() == members[2].leaves()
    assert members[0].sums.device_bytes > 0
    mine, theirs = (one.model.state_dict().values() for one in (members[2].program, plain))
    return max(float((one - other).abs().max()) for one, other in zip(mine, theirs, strict=True))


def churn(rank: int, world_size: int, folder: str, total: int, deaths: dict[str, int], births: dict[str, int]) -> Any:
    """Train up to step `total`. Ranks in `deaths` die at that step; those in `births` start when others are there."""
    if str(rank) in births:
        wait_for(Path(folder, f"step-{births[str(rank)]}"))
    model = Net().to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=20)
    losses, used = dict[int, float](), list[int]()

    def on_step(gradients: dict[str, Any], step: int) -> None:
        used.append(torch.cuda.memory_allocated())
        Path(folder, f"step-{step}").touch()

    options = settings("cuda-churn", nodes="2:" if world_size > 1 else 1, scaler=scaler, clip_norm=0.5)
    with elastic(model, optimizer, on_step=on_step, **options) as run:
        for index, x, y in run.loader(Rows(), microbatch=DATA.microbatch, steps=total, pin_memory=True):
            if run.number >= deaths.get(str(rank), total):
                os.kill(os.getpid(), signal.SIGKILL)
            with torch.autocast("cuda", torch.bfloat16):
                found = model(index.to(CUDA), x.to(CUDA))
            run.backward(((found.float() - y.to(CUDA)) ** 2).mean())
            if run.step():
                losses[run.number] = run.loss
        return {
            "state": state_of(run),
            "seen": sorted(set(model.seen.tolist())),
            "losses": losses,
            "number": run.number,
            "grown": max(used) - used[len(used) // 2],
        }
