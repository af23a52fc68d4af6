"""What ranks with tensors on a device without CUDA's streams do, by name; see `scenarios` and `far_device`."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringfort
import ringfort.torch
from ringfort.torch.compression import _ReduceScatter
from ringfort.torch.training import run as run_module
from tests.torch import far_device, scenarios
from tests.torch.elastic_scenarios import DATA, Net, Rows, settings
from tests.torch.scenarios import group, raised


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 64)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(64, 8))


def collectives(rank: int, world_size: int) -> None:
    """Every collective, for few element types: each kernel of the stand-in is Python."""
    scenarios.DTYPES[:] = [torch.int32, torch.bfloat16, torch.float32]
    scenarios.collectives(rank, world_size)


def ddp(rank: int, world_size: int, kinds: list[str], slow: float = 0.0) -> Any:
    """Learn with DistributedDataParallel, in several buckets; rank r has its model on `kinds[r]`. Return the losses,
    what the device complains of, and who has used it."""
    far_device.slow = slow
    device = kinds[rank]
    with group(rank, world_size):
        model = DistributedDataParallel(_model().to(device), bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(rank)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 32, device="cpu").to(device)).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, far_device.collisions, sorted(far_device.seen)


def several_at_once(rank: int, world_size: int) -> Any:
    """Many calls under way while the program computes on the device. Return what the device complains of, and who has
    used it."""
    far_device.slow = 0.001
    n = world_size
    with group(rank, n):
        tensors = [torch.full((1000,), float(turn), device="far") for turn in range(8)]
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        received = torch.zeros(5, device="far")
        works.append(dist.irecv(received, (rank - 1) % n))
        works.append(dist.isend(torch.full((5,), float(rank), device="far"), (rank + 1) % n))
        total = torch.zeros(1000, device="far")
        for _ in range(20):
            total += 1.0
        while not all(work.is_completed() for work in works):
            total += 1.0
        assert [x[0].item() for x in tensors] == [float(n * turn) for turn in range(8)]
        assert received.tolist() == [float((rank - 1) % n)] * 5
        # A future is complete when the caller gets it, so callbacks run in the caller's thread.
        future = dist.all_reduce(total, async_op=True).get_future()
        assert future.done()
        where = future.then(lambda _: threading.current_thread().name).wait()
        return where, far_device.collisions, sorted(far_device.seen)


def waits_in_any_order(rank: int, world_size: int) -> None:
    """Calls on the same memory see each other's results, whatever the program waits for first."""
    n = world_size
    with group(rank, n):
        whole = torch.ones(6, device="far")
        first = dist.all_reduce(whole[:4], async_op=True)
        second = dist.all_reduce(whole[2:], async_op=True)  # reads what the first writes
        third = dist.broadcast(whole, 1, async_op=True)
        third.wait()
        second.wait()
        first.wait()
        assert whole.tolist() == [n, n, n * n, n * n, n, n]
        dist.all_reduce(whole, async_op=True)  # nobody waits
        dist.all_reduce(whole)
        assert whole[0].item() == n**3
        half = whole.view(2, 3).t()  # not contiguous
        dist.all_reduce(half)
        assert whole[0].item() == n**4
        with torch.inference_mode():
            x = torch.ones(3, device="far")
            dist.all_reduce(x)
        assert x.tolist() == [n] * 3


def errors(rank: int, world_size: int) -> list[str]:
    """What fails, fails at whoever waits; and a device that cannot be copied from is refused."""
    with group(rank, world_size) as pg:
        found = [str(raised(lambda: dist.all_reduce(torch.ones(2, device="meta"))))]
        if rank == 0:
            x = torch.ones(3, device="far")
            work = dist.all_reduce(x, async_op=True)
            error = raised(work.wait)
            assert isinstance(error, ringfort.DistributedError), error
            assert work.is_completed()
            assert not work.is_success()
            assert x.tolist() == [1.0] * 3
            assert isinstance(raised(work.get_future().wait), RuntimeError)
            found.append(str(error))
        pg.abort()
        return found


def compressed(rank: int, world_size: int, kinds: list[str], fragments: int) -> Any:
    """Learn with the hook that compresses, scatter a tensor, and learn in rounds of local steps; rank r has all on
    `kinds[r]`. Return the losses, elements of the parts, weights in a round and in the end, and what the device
    complains of."""
    far_device.slow = 0.0002
    device = kinds[rank]

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 32, device="cpu").to(device)).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    with group(rank, world_size) as pg:
        losses: list[float] = []
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
        model = DistributedDataParallel(module, bucket_cap_mb=0.01)
        hook = ringfort.torch.compress_hook("int8")
        model.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        torch.manual_seed(rank)
        train(model, optimizer, 3)
        part, inputs = torch.zeros(500, device=device), torch.ones(500 * world_size, device=device) * (rank + 1)
        scatter = _ReduceScatter(hook.compressor, "part")
        work = scatter(part, inputs, pg, dist.ReduceOp.SUM, async_op=True)
        assert work is not None
        work.wait()
        parts = [part.cpu()[0].item()]
        assert scatter(part, inputs, pg, dist.ReduceOp.AVG) is None
        parts.append(part.cpu()[0].item())
        local = ringfort.torch.local_steps(
            module, optimizer, samples=16, every=3, codec="int8", pace="steps", fragments=fragments
        )
        train(module, optimizer, 5)
        with local.global_weights():
            evaluated = [one.detach().cpu().flatten()[0].item() for one in module.parameters()]
        local.end_round()
        weights = [one.detach().cpu().tolist() for one in module.parameters()]
        return losses, parts, evaluated, weights, far_device.collisions


def elastic(rank: int, world_size: int, kinds: list[str]) -> Any:
    """Train in an elastic run; member r has its model on `kinds[r]`. Return losses, weights and complaints."""
    run_module.check_model = lambda *_: None  # tensors of the stand-in are of a class, which those of a device are not
    model = Net().to(kinds[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    options = settings("far", nodes=str(world_size), clip_norm=0.5)
    with run_module.elastic(model, optimizer, **options) as run:
        for index, x, y in run.loader(Rows(), microbatch=DATA.microbatch, steps=8):
            places, inputs, targets = (one.to(kinds[rank]) for one in (index, x, y))
            run.backward(torch.nn.functional.mse_loss(model(places, inputs), targets))
            if run.step():
                losses.append(run.loss)
    weights = [one.detach().cpu().flatten()[0].item() for one in model.parameters()]
    return losses, weights, model.seen.cpu().tolist(), far_device.collisions
