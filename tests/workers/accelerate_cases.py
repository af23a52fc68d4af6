"""What `ringfort.integrations.accelerate.prepare` does, by the only member of a run: `accelerate_cases.py CASE` prints
what was seen, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from ringfort.errors import DistributedError
from ringfort.integrations.accelerate import prepare

SAMPLES, MICRO = 90, 8


def data() -> TensorDataset:
    x = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x.sum(1, keepdim=True))


def parts(**options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(data(), **{"batch_size": MICRO, "shuffle": True, **options})
    return model, optimizer, loader, StepLR(optimizer, 1, 0.5)


def weights(model: Any) -> list[float]:
    return [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]


def plain(rates: list[float], clip: float) -> list[float]:
    """The weights of a loop without a run, in which each step has all samples."""
    model, (x, y) = parts()[0], data().tensors
    for rate in rates:
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(rate * parameter.grad)
    return weights(model)


# --- the cases --------------------------------------------------------------------------------------------------------


def passes() -> dict[str, Any]:
    """The usual loop, with clipping, a scheduler and mixed precision; each step is a pass."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer, loader, scheduler = prepare(
        accelerator, *parts(), batch=SAMPLES, epochs=3, clip_norm=0.5, nodes=1, name="passes"
    )
    seen: dict[str, Any] = {"samples": [], "type": str(model(torch.ones(1, 2)).dtype), "length": len(loader)}
    for _ in range(4):  # one more than there are
        seen["samples"].append(0)
        for x, y in loader:
            seen["samples"][-1] += len(x)
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    seen["inside"] = str((model.weight @ x.T).dtype)
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return {
        **seen,
        "rate": scheduler.get_last_lr(),
        "weights": weights(accelerator.unwrap_model(model)),
        "plain": plain([0.5, 0.25, 0.125], 0.5),
        "step": loader.run.number,
    }


def steps() -> dict[str, Any]:
    """With a number of steps, one `for` is the whole run. The losses are scaled."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)  # which Accelerate makes for GPUs alone
    model, optimizer, loader = prepare(accelerator, *parts()[:3], batch=SAMPLES, steps=5, nodes=1, name="steps")
    seen: dict[str, Any] = {"samples": 0, "again": 0}
    for x, y in loader:
        seen["samples"] += len(x)
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    for _ in loader:
        seen["again"] += 1
    expected = plain([0.5] * 5, float("inf"))
    return {**seen, "step": loader.run.number, "weights": weights(model), "plain": expected}


def rounds() -> dict[str, Any]:
    """Passes with local steps: each micro-batch is an optimizer step, and the machines decide how many a round has."""
    accelerator, seen = Accelerator(cpu=True), list[int]()
    model, optimizer, loader = prepare(
        accelerator, *parts()[:3], batch=MICRO, epochs=2, sync="auto", nodes=1, name="rounds"
    )
    for _ in range(3):  # one more than there are
        seen.append(0)
        for x, y in loader:
            seen[-1] += len(x)
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return {"samples": seen, "length": len(loader), "rounds": loader.run.number}


def refusals() -> dict[str, Any]:
    """The errors of `prepare`, and of what it replaces."""
    seen = {}

    def refused(name: str, call: Any) -> None:
        try:
            call()
            seen[name] = "none"
        except DistributedError as exc:
            seen[name] = str(exc)

    accelerator = Accelerator(cpu=True)
    refused("neither", lambda: prepare(accelerator, *parts(), batch=32))
    refused("both", lambda: prepare(accelerator, *parts(), batch=32, epochs=1, steps=1))
    refused("sampler", lambda: prepare(accelerator, *parts(sampler=[1, 2], shuffle=False), batch=32, epochs=1))
    accelerator.gradient_accumulation_steps = 2
    refused("accumulate", lambda: prepare(accelerator, *parts(), batch=32, epochs=1))
    accelerator.gradient_accumulation_steps = 1
    AcceleratorState._shared_state["num_processes"] = 2
    refused("processes", lambda: prepare(accelerator, *parts(), batch=32, epochs=1))
    AcceleratorState._shared_state["num_processes"] = 1
    model, *_ = prepare(accelerator, *parts(), batch=32, epochs=1, clip_norm=1.0)
    refused("clip", lambda: accelerator.clip_grad_norm_(model.parameters(), 2.0))
    refused("infinite", lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf")))
    refused("same", lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
    refused("value", lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))
    return seen


if __name__ == "__main__":
    print("seen " + json.dumps(globals()[sys.argv[1]]()), flush=True)
