"""What the processes of the tests of elastic runs with sharded models do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which torch itself loads late, and every rank by itself
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

from ringfort.config import AutoDiscoveryConfig
from ringfort.torch.sharding import shard
from ringfort.torch.training.run import TorchRun, elastic
from ringfort.torch.training.sharded_run import ShardedRun
from ringfort.training.elastic.dealing import Data
from tests.torch.scenarios import group, raised
from tests.torch.sharding_scenarios import pretend_hosts

DATA = Data(samples=96, batch=16, microbatch=5)
"""Micro-batches of 5, 5, 5 and 1: the shares of local ranks are unequal, and sometimes empty."""
SLOW = 0.15
"""Seconds that a micro-batch takes until the tests are in a hurry."""
LOOPBACK = AutoDiscoveryConfig(interfaces=("127.0.0.1",))


class Net(nn.Module):
    """Two layers, a frozen one, and a weight for each sample, whose gradient counts how often the sample was used."""

    def __init__(self, *, has_norm: bool = False) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 7).requires_grad_(False)
        self.layers = nn.ModuleList([nn.Linear(7, 5), nn.BatchNorm1d(5) if has_norm else nn.Tanh(), nn.Linear(5, 1)])
        self.seen = nn.Embedding(DATA.samples, 1)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = torch.sin(index[:, None] * torch.arange(1, 7, device=index.device) / 10)
        for layer in (self.frozen, *self.layers):
            x = layer(x)
        return (x - 1).square() + self.seen(index)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [one for one in model.parameters() if one.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=0.02, momentum=0.9)
    return torch.optim.AdamW(trained, lr=0.01)


def plain(optimizer: str, epochs: int, clip_norm: float | None = None) -> dict[str, Any]:
    """Train in this process alone, without sharding and without faults."""
    torch.manual_seed(0)
    model, cursor = Net(), 0
    stepped = optimizer_of(optimizer, model)
    schedule = torch.optim.lr_scheduler.StepLR(stepped, 5, 0.9)
    while cursor < epochs * DATA.samples:
        span = DATA.span(cursor)
        batch = torch.cat([torch.as_tensor(DATA.part(span, part)) for part in range(DATA.parts(span))])
        stepped.zero_grad()
        model(batch).mean().backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        stepped.step()
        schedule.step()
        cursor += span.samples
    return {name: value.tolist() for name, value in model.state_dict().items()}


# --- one local rank of a machine --------------------------------------------------------------------------------------


def machines(rank: int, world_size: int, folder: str, plans: list[dict[str, Any]]) -> dict[str, Any]:
    """Be a process of the machine that `plans` says."""
    torch.set_num_threads(1)
    return train(Path(folder), **plans[rank])


def train(
    folder: Path,
    *,
    machine: str,
    rank: int,
    ranks: int,
    name: str,
    epochs: int,
    waits_for: str = "",
    gets: str = "",
    has_padding: bool = False,
    backend: str = "gloo",
    strategy: str = "HYBRID_SHARD",
    optimizer: str = "adam",
    scale: float = 0.0,
    has_norm: bool = False,
    microbatch: int = DATA.microbatch,
    workers: int = 0,
    device: str = "cpu",
    checkpoint: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train as local rank `rank` of `ranks`; with 0 ranks, a model that is not sharded. Return where it ended."""
    while waits_for and not (folder / waits_for).exists():
        time.sleep(0.01)
    torch.manual_seed(0)
    model: Any = Net(has_norm=has_norm).to(device)
    if ranks:
        store = dist.FileStore(str(folder / f"store-{machine}"), ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        model = shard(model, strategy)
    stepped = optimizer_of(optimizer, model)
    schedule = torch.optim.lr_scheduler.StepLR(stepped, 5, 0.9)
    seen, steps = {"seen": torch.zeros(DATA.samples)}, list[int]()

    def on_step(gradients: dict[str, Any], step: int) -> None:
        seen["seen"] += whole(gradients["seen.weight"]).flatten().cpu() * DATA.batch
        steps.append(step)

    with elastic(
        model,
        stepped,
        batch=DATA.batch,
        scheduler=schedule,
        scaler=torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=5) if scale else None,
        state=seen,
        on_step=on_step,
        name=name,
        checkpoint=checkpoint,
        checkpoint_every=4,
        config=LOOPBACK,
        **options,
    ) as run:
        for index in run.loader(list(range(DATA.samples)), microbatch=microbatch, epochs=epochs, num_workers=workers):
            if not (folder / "hurry").exists():
                time.sleep(SLOW)
            if has_padding and rank:
                none = torch.zeros(len(index), 1, device=device)
                run.backward((model(index.to(device)) * none).sum() / none.sum(), weight=0)  # NaN, and its gradients
            else:
                run.backward(model(index.to(device)).mean())
            if run.step():
                tell(run, folder)
                if gets and (folder / "two").exists():
                    os.kill(os.getpid(), signal.Signals[gets])
                    gets = ""
    found = {
        "done": run.number,
        "steps": steps,
        "weights": {key: whole(value).tolist() for key, value in model.state_dict().items()},
        "moments": [whole(value).tolist() for one in stepped.state.values() for value in one.values()],
        "seen": seen["seen"].tolist(),
        "lr": schedule.get_last_lr(),
        "is_sharded": isinstance(run, ShardedRun),
    }
    if ranks:
        dist.destroy_process_group()
    return found


def tell(run: TorchRun, folder: Path) -> None:
    """Tell the other processes how many members there are, in files: two, then one alone, then two again."""
    two, alone, hurry = (folder / name for name in ("two", "alone", "hurry"))
    if len(run.members) == 2:
        (hurry if alone.exists() else two).touch()
    elif two.exists():
        alone.touch()


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(rank: int, world_size: int) -> list[str]:
    """Models whose shards are not those of one machine."""
    pretend_hosts(rank, 2)  # of four ranks, two each
    with group(rank, world_size, "gloo"):
        said = [_refusal(shard(Net(), strategy)) for strategy in ("FULL_SHARD", "HYBRID_SHARD")]
        pretend_hosts(rank, 4)
        mesh = dist.device_mesh.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("machine", "rank"))
        said.append(_refusal(torch.distributed.fsdp.fully_shard(Net(), mesh=mesh["rank"])))
        line = dist.device_mesh.DeviceMesh("cpu", range(world_size))
        said.append(_refusal(torch.distributed.tensor.distribute_module(Net(), line)))
        model = Net()
        said.append(_refusal(shard(model, ignored_params={model.seen.weight})))
    return said


def _refusal(model: Any) -> str:
    return str(raised(lambda: elastic(model, optimizer_of("sgd", model), batch=4, config=LOOPBACK)))


def unweighted(rank: int, world_size: int, name: str) -> str:
    """A program that calls `loss.backward()` itself."""
    with group(rank, world_size, "gloo"):
        model = shard(Net(), "HYBRID_SHARD")
        with elastic(model, optimizer_of("sgd", model), batch=4, name=name, config=LOOPBACK) as run:
            for index in run.loader(list(range(8)), microbatch=4, epochs=1):
                model(index).mean().backward()
                return str(raised(run.step))
    return ""
