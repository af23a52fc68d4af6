"""What single processes do in tests of elastic torch runs. `rank` is only a name here: machines come and go."""

from __future__ import annotations

import os
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ringfort.config import AutoDiscoveryConfig
from ringfort.errors import NonFiniteStepError
from ringfort.torch.training.run import TorchRun, elastic
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.state_check import leaves_of

DATA = Data(samples=64, batch=16, microbatch=4, seed=7)


class Rows(torch.utils.data.Dataset):
    """Samples of four numbers, with their index and a target."""

    def __len__(self) -> int:
        return DATA.samples

    def __getitem__(self, index: int) -> tuple[int, Any, Any]:
        x = torch.sin(torch.tensor([1.0, 0.7, 0.31, 0.11]) * index)
        return index, x, x[:1] * x[1:2]


class Net(torch.nn.Module):
    """A small model with dropout and BatchNorm, whose buffer `seen` counts the samples of all steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(DATA.samples))

    def forward(self, index: Any, x: Any) -> Any:
        if self.training:
            self.seen[index] += DATA.batch / len(index)  # the move is the mean over the batch
        return self.last(torch.nn.functional.dropout(self.norm(torch.tanh(self.first(x))), 0.2, self.training))


def settings(name: str, **options: Any) -> dict[str, Any]:
    """Arguments of `elastic` for tests."""
    config = AutoDiscoveryConfig(interfaces=["127.0.0.1"])
    return {"batch": DATA.batch, "seed": DATA.seed, "name": name, "config": config, "patience": 10, **options}


def state_of(run: TorchRun) -> dict[str, Any]:
    """Return the digests of the state, and how often samples were seen."""
    return leaves_of("", run.state).digests


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} has not come"
        time.sleep(0.005)


# --- machines come and go ---------------------------------------------------------------------------------------------


def churn(rank: int, world_size: int, folder: str, total: int, deaths: dict[str, int], births: dict[str, int]) -> Any:
    """Train up to step `total`. Ranks in `deaths` die there, in the middle of a micro-batch; those in `births` start
    when others are there. Schedule, clipping, scaler, average of weights and unfreezing belong to it."""
    if str(rank) in births:
        wait_for(Path(folder, f"step-{births[str(rank)]}"))
    model = Net()
    model.first.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=20)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total + 1)
    losses = dict[int, float]()

    def on_step(gradients: dict[str, Any], step: int) -> None:
        average.update_parameters(model)
        if step == total // 3:
            model.first.requires_grad_(True)
        Path(folder, f"step-{step}").touch()

    options = settings("churn", nodes="2:" if world_size > 1 else 1, scaler=scaler, scheduler=schedule)
    run = elastic(model, optimizer, state={"ema": average}, on_step=on_step, clip_norm=0.5, **options)
    with run:
        for index, x, y in run.loader(Rows(), microbatch=DATA.microbatch, steps=total):
            if run.number >= deaths.get(str(rank), total):
                os.kill(os.getpid(), signal.SIGKILL)
            with torch.autocast("cpu", torch.bfloat16):
                found = model(index, x)
            run.backward(((found.float() - y) ** 2).mean())
            if run.step():
                losses[run.number] = run.loss
        return {
            "state": state_of(run),
            "seen": sorted(set(model.seen.tolist())),
            "losses": losses,
            "number": run.number,
        }


# --- one program ------------------------------------------------------------------------------------------------------


def error_of(action: Any) -> str:
    """Return what an action raises."""
    try:
        action()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return "nothing"


def misuse(rank: int, world_size: int) -> dict[str, str]:
    """Do everything wrong that can be done in a loop. Return the errors."""
    model, found = Net(), dict[str, str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = elastic(model, optimizer, **settings("misuse", nodes=1))
    found["backward before"] = error_of(lambda: run.backward(torch.zeros(1)))
    found["step before"] = error_of(run.step)
    turn = count()
    for index, x, y in run.loader(Rows(), microbatch=4, steps=3):
        number = next(turn)
        loss = ((model(index, x) - y) ** 2).mean()
        if number == 0:
            found["loss"] = error_of(lambda: run.backward(loss.repeat(2)))  # noqa: B023
            found["float"] = error_of(lambda: run.backward(1.0))
            found["weight"] = error_of(lambda: run.backward(loss, weight=-1))  # noqa: B023
            found["weights"] = error_of(lambda: run.backward(loss, weight=torch.ones(2)))  # noqa: B023
            found["second loader"] = error_of(lambda: run.loader(Rows(), microbatch=4, steps=3))
        if number in (0, 3):
            found[f"no gradients {number}"] = error_of(run.step)
            found["optimizer"] = error_of(optimizer.step)
        run.backward(loss, weight=torch.tensor(4))
        run.step()
        found["step twice"] = error_of(run.step)
        found["backward after"] = error_of(lambda: run.backward(loss))  # noqa: B023
    found["at the end"] = error_of(run.step)
    found["state"] = f"{run.number} {sorted(set(model.seen.tolist()))}"
    optimizer.step()  # it is the program's again

    run = elastic(model, optimizer, **settings("forgetful", nodes=1))
    found["forgotten"] = error_of(
        lambda: [run.backward(model(*item[:2]).mean()) for item in run.loader(Rows(), microbatch=4, steps=3)]
    )

    def on_step(gradients: dict[str, Any], step: int) -> None:
        raise KeyError("on_step")

    run = elastic(model, optimizer, on_step=on_step, **settings("failing", nodes=1))

    def go_on_after_an_error() -> None:
        for index, x, _ in run.loader(Rows(), microbatch=16, steps=3):
            run.backward(model(index, x).mean())
            found["on_step"] = error_of(run.step)

    found["after on_step"] = error_of(go_on_after_an_error)
    scaler = torch.amp.GradScaler("cpu")
    run = elastic(model, optimizer, scaler=scaler, **settings("unscaled", nodes=1))

    def not_scaled() -> None:
        for index, x, _ in run.loader(Rows(), microbatch=16, steps=3):
            model(index, x).mean().backward()
            run.optimizer.step()

    found["unscaled"] = error_of(not_scaled)
    return found


def loops(rank: int, world_size: int, total: int, workers: int) -> Any:
    """Members whose loops differ compute the same: one leaves in a hook, one gets SIGTERM, one has a loop that knows
    nothing of the run, with workers that load."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run, together = elastic(model, optimizer, **settings("loops", nodes="1:")), list[int]()
    loader = run.loader(Rows(), microbatch=4, steps=total, num_workers=workers if rank == 2 else 0)
    validations = 0

    def hook(*_: Any) -> None:
        if len(run.members) == world_size:
            together.append(run.number)
        elif not together:
            time.sleep(0.02)  # so all come before the run has ended
        if rank == 0 and together and run.number >= together[0] + 3:
            run.leave()
        if rank == 1 and together and run.number == together[0] + 6:
            os.kill(os.getpid(), signal.SIGTERM)

    model.register_forward_hook(hook)
    if rank != 2:
        for index, x, y in loader:
            run.backward(((model(index, x) - y) ** 2).mean())
            run.step()
        return {"state": state_of(run), "number": run.number}
    optimizer = run.optimizer
    for index, x, y in loader:
        optimizer.zero_grad()
        loss = ((model(index, x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        if run.is_first and run.number % 4 == 0:
            model.eval()
            with run.aside(), torch.no_grad():
                model(index, x)
            validations += 1
            model.train()
    seen = sorted(set(model.seen.tolist()))
    return {"state": state_of(run), "number": run.number, "seen": seen, "validations": validations}


def epochs(rank: int, world_size: int) -> Any:
    """The nested loop of ordinary scripts, with a scheduler, with breaks, and with mistakes."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run = elastic(model, optimizer, scheduler=schedule, scheduler_per="pass", **settings("epochs", nodes=1))
    loader, seen = run.loader(Rows(), microbatch=4, epochs=3, per="pass"), list[int]()
    found: dict[str, Any] = {"length": len(loader), "again": []}
    for epoch in range(4):
        seen.append(0)
        for number, (index, x, y) in enumerate(loader):
            if epoch == 1 and number == 3:
                found["again"].append(index.tolist())
                break  # before it is computed: the next `for` begins with it
            if epoch == 2 and number == 0:
                found["again"].append(index.tolist())
            run.optimizer.zero_grad()
            ((model(index, x) - y) ** 2).mean().backward()
            run.optimizer.step()
            seen[-1] += 1
    found |= {"batches": seen, "rate": optimizer.param_groups[0]["lr"]}
    for index, x, _ in loader:  # the rest: a `for` was lost to the break
        run.backward(model(index, x).mean())
        run.step()
    found |= {"number": run.number, "seen": sorted(set(model.seen.tolist()))}

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run = elastic(model, optimizer, **settings("breaking", nodes=1))
    loader = run.loader(Rows(), microbatch=4, epochs=3)

    def step_it() -> None:
        for index, x, _ in loader:
            run.backward(model(index, x).mean())
            schedule.step()
            run.step()

    found["stepped"] = error_of(step_it)
    found["second"] = error_of(lambda: list(loader))
    model(torch.arange(4), torch.ones(4, 4)).mean().backward()
    found["is_free"] = model.first.weight.grad is not None
    return found


class Rounding(torch.optim.SGD):
    """Rounds differently from other machines."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 + 1e-6)
        return found


def kinds(rank: int, world_size: int, total: int) -> Any:
    """One of the members is of another kind, and rounds differently; one has compiled its model."""
    plain = Net()
    # As eager, without a compiler of C++, which takes half a minute.
    model = torch.compile(plain, backend="aot_eager") if rank == 2 else plain
    kind = Rounding if rank == 1 else torch.optim.SGD
    options = settings("kinds", nodes=world_size, machine_class="Mac" if rank == 1 else "PC")
    with elastic(model, kind(model.parameters(), lr=0.01), **options) as run:
        for index, x, y in run.loader(Rows(), microbatch=4, steps=total):
            run.backward(((model(index, x) - y) ** 2).mean())
            run.step()
        drift, seen = [line for line in run.events if "drift" in line], sorted(set(plain.seen.tolist()))
        return {"state": state_of(run), "drift": drift, "number": run.number, "seen": seen}


def restart(rank: int, world_size: int, folder: str, total: int, dies_at: int) -> Any:
    """Train with checkpoints, and die after a step; or continue."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run = elastic(model, optimizer, checkpoint=folder, checkpoint_every=4, **settings("restart", nodes=1))
    first = -1
    with run:
        for index, x, y in run.loader(Rows(), microbatch=8, steps=total):
            first = run.number if first < 0 else first
            if run.number == dies_at:
                while not any(Path(folder).glob("step-*.ringfort")):  # they are written while it trains
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            run.backward(((model(index, x) - y) ** 2).mean())
            run.step()
    return {"state": state_of(run), "first": first, "seen": sorted(set(model.seen.tolist()))}


def callbacks(rank: int, world_size: int) -> Any:
    """Use the run in `on_step`."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told, returned, errors = list[Any](), list[bool](), list[str]()

    def on_step(gradients: dict[str, Any], step: int) -> None:
        told.append([step, run.number, run.epoch, len(run.members), run.is_first, run.loss > 0, torch.rand(1).item()])
        errors.extend([error_of(run.step), error_of(lambda: run.backward(torch.zeros(1)))])
        if step == 5:
            run.leave()

    run = elastic(model, optimizer, on_step=on_step, **settings("callbacks", nodes=1))
    for index, x, y in run.loader(Rows(), microbatch=4, steps=100):
        run.backward(((model(index, x) - y) ** 2).mean())
        returned.append(run.step())

    def close(gradients: dict[str, Any], step: int) -> None:
        if step == 2:
            run.close()

    run = elastic(model, optimizer, on_step=close, **settings("closing", nodes=1))

    def go_on() -> None:
        for index, x, _ in run.loader(Rows(), microbatch=16, steps=100):
            run.backward(model(index, x).mean())
            run.step()

    return {"told": told, "returned": returned, "errors": sorted(set(errors)), "closed": error_of(go_on)}


def nonfinite(rank: int, world_size: int) -> str:
    """The loss is infinite once."""
    model = Net()
    run = elastic(model, torch.optim.SGD(model.parameters(), lr=0.05), **settings("nonfinite", nodes=world_size))
    try:
        for index, x, y in run.loader(Rows(), microbatch=8, steps=20):
            factor = float("inf") if run.number == 3 else 1.0
            run.backward(((model(index, x) - y) ** 2).mean() * factor)
            run.step()
    except NonFiniteStepError as exc:
        return str(exc)
    return "nothing"
