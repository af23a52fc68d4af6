"""What single processes do in tests of elastic torch runs with local steps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringfort.config import AutoDiscoveryConfig
from ringfort.torch.training.run import elastic
from tests.torch.elastic_scenarios import DATA, Net, Rows, error_of, settings, state_of, wait_for

BATCH = 4
EVERY = DATA.batch // BATCH


def local(name: str, **options: Any) -> dict[str, Any]:
    """Arguments of `elastic` for rounds of 16 samples."""
    return settings(name, sync="local", every=EVERY, **options) | {"batch": BATCH}


def churn(
    rank: int, world_size: int, folder: str, total: int, codec: str, deaths: dict[str, int], births: dict[str, int]
) -> Any:
    """Train up to round `total`. Ranks in `deaths` die there, in the middle of a round; those in `births` start when
    others are there. Schedule, clipping, scaler and an average of weights belong to it."""
    if str(rank) in births:
        wait_for(Path(folder, f"step-{births[str(rank)]}"))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=20)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total * EVERY + 1)
    losses, rates, turns = dict[int, float](), dict[int, float](), 0

    def on_step(differences: dict[str, Any], step: int) -> None:
        average.update_parameters(model)
        rates[step] = optimizer.param_groups[0]["lr"]
        losses[step] = run.loss  # of rounds without a part for this member too
        Path(folder, f"step-{step}").touch()

    options = local("rounds", nodes="2:" if world_size > 1 else 1, codec=codec, scaler=scaler, scheduler=schedule)
    if codec != "sparse":
        options |= {"outer_rate": 0.8, "outer_momentum": 0.3}
    run = elastic(model, optimizer, state={"ema": average}, on_step=on_step, clip_norm=0.5, **options)
    with run:
        for index, x, y in run.loader(Rows(), microbatch=BATCH, steps=total):
            turns += 1
            if run.number >= deaths.get(str(rank), total):
                os.kill(os.getpid(), signal.SIGKILL)
            run.backward(((model(index, x) - y) ** 2).mean())
            run.step()
        end = {"state": state_of(run), "seen": sorted(set(model.seen.tolist())), "losses": losses, "rates": rates}
        weights = [p.detach().numpy().tobytes().hex() for p in model.parameters()]
        return {**end, "number": run.number, "weights": weights, "turns": turns}


def passes(rank: int, world_size: int) -> Any:
    """Two passes with fixed rounds in one `for`, and with planned ones in several. A pass is no whole number of rounds.
    Return the samples of each `for`, the micro-batches that were announced, and the rounds."""
    found = dict[str, Any]()
    for sync, every, per in (("local", 3, "run"), ("auto", None, "pass")):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = settings(f"passes-{sync}", nodes=1, sync=sync, every=every) | {"batch": BATCH}
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        with elastic(model, optimizer, scheduler=schedule, scheduler_per="pass", **options) as run:
            loader = run.loader(Rows(), microbatch=BATCH, epochs=2, per=per)
            seen, epochs = list[int](), list[int]()
            for _ in range(1 if per == "run" else 3):
                seen.append(0)
                for index, x, y in loader:
                    seen[-1] += len(index)
                    epochs.append(run.epoch)
                    run.backward(((model(index, x) - y) ** 2).mean())
                    run.step()
            found[sync] = {
                "seen": seen,
                "length": len(loader),
                "rounds": run.number,
                "epochs": [epochs.count(number) for number in sorted(set(epochs))],
                "rate": optimizer.param_groups[0]["lr"],
            }
    return found


def shown(rank: int, world_size: int) -> Any:
    """Look at the global weights in the middle of a round, and make mistakes."""
    model, found = Net(), dict[str, Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = elastic(model, optimizer, **local("shown", nodes=1, codec="none", outer_rate=1.0, outer_momentum=0.0))
    moved = list[bool]()
    before = model.last.weight.detach().clone()
    for turn, (index, x, y) in enumerate(run.loader(Rows(), microbatch=BATCH, steps=3)):
        own = model.last.weight.detach().clone()
        with run.global_weights():
            moved.append(not torch.equal(own, model.last.weight))
            assert torch.equal(model.last.weight, before)
        assert torch.equal(own, model.last.weight)
        run.backward(((model(index, x) - y) ** 2).mean())
        if turn == 1:
            found["optimizer"] = error_of(optimizer.step)
        if run.step():
            before = model.last.weight.detach().clone()
            assert not torch.equal(own, before)
    found["moved"] = moved
    double = torch.nn.Linear(4, 1).double()
    sgd = torch.optim.SGD(double.parameters(), lr=0.1)
    found["double"] = error_of(lambda: elastic(double, sgd, **local("double", nodes=1)))
    for name, options in {
        "sync": {"sync": "often"},
        "every": {"every": 0},
        "codec": {"codec": "zip"},
        "outer_rate": {"outer_rate": 3},
        "outer_momentum": {"outer_momentum": 1.0},
    }.items():
        arguments = local("bad", nodes=1) | options
        found[name] = error_of(lambda arguments=arguments: elastic(model, optimizer, **arguments))
    other = elastic(model, optimizer, **local("microbatch", nodes=1))
    found["microbatch"] = error_of(lambda: other.loader(Rows(), microbatch=2, steps=3))
    other.close()
    model.last.bias.requires_grad_(True)

    def freeze(_: dict[str, Any], step: int) -> None:
        model.last.bias.requires_grad_(False)

    frozen = elastic(model, optimizer, on_step=freeze, **local("frozen", nodes=1))

    def train() -> None:
        for index, x, _ in frozen.loader(Rows(), microbatch=BATCH, steps=3):
            frozen.backward(model(index, x).mean())
            frozen.step()

    found["frozen"] = error_of(train)
    model.last.bias.requires_grad_(True)
    bad = elastic(model, optimizer, **local("nan", nodes=1))

    def explode() -> None:
        for index, x, _ in bad.loader(Rows(), microbatch=BATCH, steps=3):
            bad.backward(model(index, x).mean() * torch.nan)
            bad.step()

    found["nan"] = error_of(explode)
    return found


OTHERS: dict[str, dict[str, Any]] = {
    "codec": {"codec": "int4"},
    "every": {"every": EVERY + 1},
    "outer_rate": {"outer_rate": 0.5},
    "outer_momentum": {"outer_momentum": 0.5},
    "auto": {"sync": "auto", "every": None},
    "every_step": {"sync": "every_step", "every": None, "codec": None, "batch": DATA.batch},
    "clip_norm": {"clip_norm": 0.5},
    "scheduler_per": {"scheduler_per": "pass"},
}
"""What members have that differ from the run, in a test."""


def differ(rank: int, world_size: int, folder: str, names: list[str]) -> Any:
    """Members whose settings differ from those of the run, one after the other, are told what differs."""
    begun, told = Path(folder, "begun"), Path(folder, "told")
    quick = AutoDiscoveryConfig(interfaces=["127.0.0.1"], timeout=1.0)  # it waits no longer for a run like its own

    def train(**others: Any) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with elastic(model, optimizer, **{**local("differ", nodes=1, codec="int8"), **others}) as run:
            for index, x, y in run.loader(Rows(), microbatch=BATCH, steps=10**6):
                run.backward(((model(index, x) - y) ** 2).mean())
                run.step()
                if run.number == 5:
                    begun.touch()
                if told.exists():
                    break
                time.sleep(0.1 if rank else 0.01)  # the run with more steps stays

    if not rank:
        return error_of(train)
    wait_for(begun)
    try:
        return {name: error_of(lambda name=name: train(config=quick, **OTHERS[name])) for name in names}
    finally:
        told.touch()


def alone(rank: int, world_size: int) -> Any:
    """The weights after one round, and those of a plain loop over the same samples."""
    model = Net()
    model.eval()  # without dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run, batches = (
        elastic(model, optimizer, **local("alone", nodes=1, codec="none", outer_rate=1.0, outer_momentum=0.0)),
        [],
    )
    for index, x, y in run.loader(Rows(), microbatch=BATCH, steps=5):
        batches.append((index, x, y))
        run.backward(((model(index, x) - y) ** 2).mean())
        run.step()
    plain = Net()
    plain.eval()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for index, x, y in batches:
        optimizer.zero_grad()
        ((plain(index, x) - y) ** 2).mean().backward()
        optimizer.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float(np.abs((a - b).detach().numpy()).max()) for a, b in pairs)
