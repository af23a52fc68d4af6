"""What the ranks of the tests of compression do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringfort.torch
from ringfort import GradientCompressor
from tests.torch.scenarios import group, raised


def _model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 80), torch.nn.Tanh(), torch.nn.Linear(80, 60), torch.nn.Linear(60, 1)
    )


def _train(model: Any, rank: int, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    truth = torch.randn(40, generator=torch.Generator().manual_seed(0))
    losses: list[float] = []
    for step in range(steps):
        x = torch.randn(64, 40, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = ((model(x)[:, 0] - x @ truth) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def ddp(rank: int, world_size: int, compression: str | None, steps: int) -> tuple[list[float], list[float], int]:
    """The losses, some weights, and the bytes that were sent."""
    with group(rank, world_size) as world:
        model = DistributedDataParallel(_model(), bucket_cap_mb=0.01)
        before = world.context.metrics_snapshot().bytes_sent
        if compression is not None:
            model.register_comm_hook(None, ringfort.torch.compress_hook(compression))
        losses = _train(model, rank, steps)
        weights = [float(p.detach().double().sum()) for p in model.parameters()]
        return losses, weights, world.context.metrics_snapshot().bytes_sent - before


def fsdp(rank: int, world_size: int, compression: str | None, steps: int) -> tuple[list[float], list[str]]:
    """The losses, and what the compressor keeps."""
    with group(rank, world_size):
        model: Any = _model()
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        names: list[str] = []
        if compression is not None:
            compressor = ringfort.torch.compress_reduce_scatter(model, compression)
        losses = _train(model, rank, steps)
        if compression is not None:
            names = compressor.names
        return losses, names


def checkpoint(rank: int, world_size: int) -> bool:
    """Whether training goes on with the same bits after the hook's state was saved and loaded."""
    with group(rank, world_size):
        first: Any = ringfort.torch.compress_hook("topk(0.05)")
        model = DistributedDataParallel(_model())
        model.register_comm_hook(None, first)
        _train(model, rank, 5)
        weights = {name: p.clone() for name, p in model.module.state_dict().items()}
        state = first.compressor.state_dict()
        straight = _train(model, rank, 3)
        again = GradientCompressor("topk(0.05)")
        again.load_state_dict(state)
        fresh = DistributedDataParallel(_model())
        fresh.module.load_state_dict(weights)
        fresh.register_comm_hook(None, ringfort.torch.compress_hook(again))
        return _train(fresh, rank, 3) == straight


def refused(rank: int, world_size: int) -> list[str]:
    """What a NaN, a wrong strategy, a model without shards and a foreign group are answered with."""
    words: list[str] = []
    with group(rank, world_size):
        model = DistributedDataParallel(_model())
        model.register_comm_hook(None, ringfort.torch.compress_hook("int8"))
        x = torch.ones(2, 40)
        if rank == 1:
            x[0, 0] = torch.nan
        words.append(str(raised(lambda: model(x).sum().backward())))
        words.append(str(raised(lambda: ringfort.torch.compress_hook("zip"))))
        words.append(str(raised(lambda: ringfort.torch.compress_reduce_scatter(_model(), "int8"))))
        words.append(str(raised(lambda: ringfort.torch.compress_reduce_scatter(_model(), "topk(0.1)"))))
    with group(rank, world_size, "gloo"):
        model = DistributedDataParallel(_model())
        model.register_comm_hook(dist.group.WORLD, ringfort.torch.compress_hook("int8"))
        words.append(str(raised(lambda: model(torch.ones(2, 40)).sum().backward())))
    return words


def weighted(rank: int, world_size: int, backend: str = "ringfort") -> tuple[list[float], list[float], list[str]]:
    """Gradients of unequal batches by the hook, those of one large batch, and what misuse raises."""
    torch.manual_seed(5)
    x, y = torch.randn(10, 40), torch.randn(10, 1)
    mine = slice(0, 7) if rank == 0 else slice(7, 10)
    with group(rank, world_size, backend):
        model = DistributedDataParallel(_model(), bucket_cap_mb=0.01)
        hook = ringfort.torch.weighted_hook()
        model.register_comm_hook(None, hook)
        for _ in range(2):
            model.zero_grad()
            hook.begin(len(x[mine]))
            ((model(x[mine]) - y[mine]) ** 2).mean().backward()
        found = [float(p.grad.double().sum()) for p in model.parameters()]  # type: ignore[union-attr]
        if rank:  # a batch of padding alone
            hook.begin(0)
            (model(x[mine]) * torch.nan).mean().backward()
        else:
            model.zero_grad()
            hook.begin(5)
            ((model(x[mine]) - y[mine]) ** 2).mean().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())  # type: ignore[arg-type]
        misuse = [str(raised(lambda weight=weight: hook.begin(weight))) for weight in (-1, float("nan"), "4", True)]
        misuse.append(str(raised(lambda: model(x[mine]).mean().backward())))
    plain = _model()
    ((plain(x) - y) ** 2).mean().backward()
    return found, [float(p.grad.double().sum()) for p in plain.parameters()], misuse  # type: ignore[union-attr]


def local_steps(rank: int, world_size: int) -> tuple[list[float], list[str], list[str], int]:
    """The losses, the weights after each round, what misuse raises, and the steps that the scaler left out."""
    with group(rank, world_size):
        model = _model()
        for p in list(model.parameters())[:2]:
            p.requires_grad_(False)
        frozen = next(iter(model.parameters())).detach().clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        local = ringfort.torch.local_steps(model, optimizer, samples=lambda: 64, every=5, codec="int8", pace="steps")
        truth = torch.randn(40, generator=torch.Generator().manual_seed(0))
        losses, rounds, left_out, step = list[float](), list[str](), 0, 0
        while local.number < 12:
            x = torch.randn(64, 40, generator=torch.Generator().manual_seed(100 * step + rank))
            loss = ((model(x)[:, 0] - x @ truth) ** 2).mean()
            optimizer.zero_grad()
            scaler.scale(loss * (torch.inf if rank and step == 7 else 1)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = local._steps, local.number
            scaler.step(optimizer)
            scaler.update()
            left_out += before == (local._steps, local.number)
            losses.append(float(loss.detach()))
            if local.ended_round and before != (local._steps, local.number):
                rounds.append("".join(p.detach().numpy().tobytes().hex() for p in model.parameters()))
            step += 1
        local.remove_hook()
        number = local.number
        for _ in range(6):
            optimizer.step()
        assert local.number == number
        assert torch.equal(frozen, next(iter(model.parameters())))
        integers = torch.nn.Module()
        integers.register_parameter("n", torch.nn.Parameter(torch.arange(3), requires_grad=False))
        misuse = [
            str(raised(lambda: ringfort.torch.local_steps(DistributedDataParallel(_model()), optimizer))),
            str(raised(lambda: ringfort.torch.local_steps(model, object()))),
            str(raised(lambda: ringfort.torch.local_steps(integers, optimizer))),
            str(raised(lambda: ringfort.LocalSteps(dist.group.WORLD.context, dict(integers.named_parameters())))),  # type: ignore[union-attr]
        ]
    misuse.append(str(raised(lambda: ringfort.torch.local_steps(model, optimizer))))
    return losses, rounds, misuse, left_out
