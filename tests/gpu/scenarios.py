"""What the ranks of the tests with a GPU do. All of them share the one that there is."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch._dynamo  # which torch itself loads late, and every rank by itself
import torch.distributed as dist
import torch.distributed.fsdp

import ringfort
import ringfort.torch
from ringfort.torch import gpu_all_reduce, gpu_broadcast, shard
from tests.torch.scenarios import group, raised
from tests.torch.sharding_scenarios import model, whole

LONG = 50_000_000
"""Clock cycles of a kernel that does nothing: some 30 ms."""


# --- streams ----------------------------------------------------------------------------------------------------------


def racing(rank: int, world_size: int, count: int, turns: int) -> None:
    """A long kernel, then the one that writes; a collective; at once the one that reads, and one that writes again. Any
    that is not waited for makes a number wrong."""
    expected = sum(range(1, world_size + 1))
    with group(rank, world_size):
        x, seen, right = torch.empty(count, device="cuda"), [], []
        other = torch.cuda.Stream()
        for turn in range(turns):
            stream = other if turn % 2 else torch.cuda.default_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x.fill_(-1e9)
                torch.cuda._sleep(LONG // 4)
                x.fill_(turn * (rank + 1))
                if turn % 3 == 0:
                    dist.all_reduce(x)
                else:
                    work = dist.all_reduce(x, async_op=True)
                    garbage = torch.full((count,), 3e9, device="cuda")  # memory that is free for others at once
                    del garbage
                    work.wait()
                seen.append(torch.stack([x.min(), x.max()]))
                x.fill_(7e9)
            torch.cuda.current_stream().wait_stream(stream)
            right.append([float(turn * expected)] * 2)
        assert torch.stack(seen).tolist() == right


def forgotten(rank: int, world_size: int, turns: int) -> None:
    """Inputs and outputs that nobody holds any more while they are on their way: others do not get their memory."""
    with group(rank, world_size):
        outs = []
        for turn in range(turns):
            torch.cuda._sleep(LONG // 20)
            source = torch.full((3_000_000,), float(turn + rank), device="cuda")
            out = torch.empty(3_000_000 * world_size, device="cuda")
            work = dist.all_gather_into_tensor(out, source, async_op=True)
            del source
            torch.full((3_000_000,), 5e9, device="cuda")  # takes the memory of the source, if it is free
            work.wait()
            outs.append(out.view(world_size, -1)[:, ::100_000].clone())
            del out, work
        for turn, out in enumerate(outs):
            for r in range(world_size):
                assert out[r].unique().tolist() == [float(turn + r)], (turn, r, out[r])


def late_peer(rank: int, world_size: int) -> list[float]:
    """Rank 1 comes a second late. Returns how long rank 0's host was busy with the call, and then with waiting."""
    with group(rank, world_size):
        x = torch.ones(8_000_000, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 1:
            time.sleep(1.0)
        start = time.monotonic()
        work = dist.all_reduce(x, async_op=True)
        called = time.monotonic() - start
        work.wait()
        waited = time.monotonic() - start
        assert (x * 2).unique().tolist() == [2.0 * world_size**2]
        return [called, waited]


def two_groups(rank: int, world_size: int) -> None:
    """Collectives of two groups and of the CPU, one after the other, all on each other's results; nobody waits."""
    with group(rank, world_size):
        groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
        side = torch.cuda.Stream()
        x, host = torch.ones(5_000_000, device="cuda"), torch.ones(1000)
        for turn in range(30):
            works = []
            for one in groups:
                works.append(dist.all_reduce(x, group=one, async_op=True))
                works[-1].wait()
                x.mul_(0.5)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(LONG // 100)
                dist.all_reduce(x, group=groups[turn % 2])
                x.mul_(0.5)
            torch.cuda.current_stream().wait_stream(side)
            dist.all_reduce(host)
        assert x.unique().tolist() == [1.0]
        assert host[0] == 2.0**30


def by_futures(rank: int, world_size: int) -> None:
    """What hangs on a future, as hooks of DDP do, sees the result, in whatever stream it runs."""
    with group(rank, world_size):
        seen = []
        for turn in range(20):
            x = torch.empty(3_000_000, device="cuda")
            torch.cuda._sleep(LONG // 20)
            x.fill_(turn + rank)
            future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] / world_size)
            seen.append((turn, future.wait().unique()))
        assert all(value.tolist() == [turn + 0.5] for turn, value in seen), seen


def compressed(rank: int, world_size: int, device: str) -> tuple[list[float], list[float]]:
    """Losses of training on `device` with compressed gradients, and then in rounds of local steps."""
    with group(rank, world_size):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(32, 600), torch.nn.Tanh(), torch.nn.Linear(600, 8)]
        model = torch.nn.Sequential(*layers).to(device)
        wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        wrapped.register_comm_hook(None, ringfort.torch.compress_hook("int8"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(one: torch.nn.Module, steps: int) -> list[float]:
            losses = []
            for step in range(steps):
                x = torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
                optimizer.zero_grad()
                loss = one(x).pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        first = train(wrapped, 10)
        local = ringfort.torch.local_steps(model, optimizer, samples=16, every=3, codec="int8", pace="steps")
        second = train(model, 9)
        local.end_round()
        return first, second + [one.detach().double().sum().item() for one in model.parameters()]


def held_up(rank: int, world_size: int) -> list[float]:
    """Two calls with a long kernel between. Returns how long rank 0 waited for the first, and for both."""
    with group(rank, world_size):
        x, y = (torch.ones(20_000_000, device="cuda") for _ in range(2))
        dist.all_reduce(x)
        torch.cuda.synchronize()
        dist.barrier()
        start = time.monotonic()
        first = dist.all_reduce(x, async_op=True)
        torch.cuda._sleep(20 * LONG)
        second = dist.all_reduce(y, async_op=True)
        first.wait()
        then = time.monotonic() - start
        second.wait()
        both = time.monotonic() - start
        assert (x.unique().tolist(), y.unique().tolist()) == ([4.0], [2.0])
        return [then, both]


def driver_is_busy(rank: int, world_size: int) -> None:
    """Calls in which the driver waits for the device, while a collective waits for the other rank: they end at once,
    and do not keep the collective from ending."""
    with group(rank, world_size):
        x, done = torch.ones(4_000_000, device="cuda"), torch.ones(1)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        for action in (
            torch.cuda.empty_cache,
            lambda: torch.empty(200 << 20, dtype=torch.uint8, pin_memory=True),
            lambda: torch.empty(1 << 30, dtype=torch.uint8, device="cuda"),
            lambda: torch.linalg.svd(torch.rand(64, 64, device="cuda")),  # a library is loaded
            lambda: [torch.cuda._sleep(1000) for _ in range(3000)],  # more than a stream holds
            lambda: torch.ones(5, device="cuda").tolist(),
            lambda: torch.ones(5_000_000, device="cuda").cpu(),
            torch.cuda.synchronize,
        ):
            ballast = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
            del ballast
            x.fill_(1.0)
            dist.barrier()
            if rank == 0:
                work = dist.all_reduce(x, async_op=True)
                action()
                assert not work.is_completed()
                dist.send(done, 1)
            else:
                dist.recv(done, 0)
                work = dist.all_reduce(x, async_op=True)
                action()
            work.wait()
            assert x.unique().tolist() == [float(world_size)]


def crossing(rank: int, world_size: int) -> None:
    """Messages go to and fro while a collective that was called before waits for the other rank."""
    with group(rank, world_size):
        x, y = torch.full((6_000_000,), rank + 1.0, device="cuda"), torch.empty(3_000_000, device="cuda")
        for turn in range(5):
            work = None
            if rank == 0:
                work = dist.all_reduce(x, async_op=True)
                dist.recv(y, 1)
                assert y.unique().tolist() == [float(turn)]
                dist.send(y + 1, 1)
            else:
                dist.send(torch.full_like(y, float(turn)), 0)
                dist.recv(y, 0)
                assert y.unique().tolist() == [turn + 1.0]
                work = dist.all_reduce(x, async_op=True)
            work.wait()
            assert x.unique().tolist() == [3.0 * 2**turn]


def many_at_once(rank: int, world_size: int) -> None:
    """Many calls in several groups, with nobody waiting between."""
    with group(rank, world_size):
        groups = [dist.new_group(list(range(world_size))) for _ in range(3)]
        tensors = [torch.full((5_000_000,), float(turn), device="cuda") for turn in range(60)]
        works = [dist.all_reduce(x, group=groups[turn % 3], async_op=True) for turn, x in enumerate(tensors)]
        for work in works:
            work.wait()
        assert [float(x[-1]) for x in tensors] == [world_size * float(turn) for turn in range(60)]


def large(rank: int, world_size: int) -> None:
    """Far more chunks than there are buffers, and an odd number of elements."""
    count = (300 << 20) + 7
    with group(rank, world_size):
        x = torch.full((count,), rank + 1.0, dtype=torch.bfloat16, device="cuda")
        dist.all_reduce(x)
        assert x.unique().tolist() == [3.0]
        x = torch.full((count,), rank + 1.0, dtype=torch.bfloat16, device="cuda")
        dist.broadcast(x, 1)
        assert x.unique().tolist() == [2.0]


# --- what goes wrong --------------------------------------------------------------------------------------------------


def killed(rank: int, world_size: int) -> tuple[float, str] | None:
    """Rank 1 is killed; rank 0 gets an error that names it, and hangs neither then nor in the end."""
    with group(rank, world_size):
        x = torch.ones(20_000_000, device="cuda")
        start = time.monotonic()
        for turn in range(100):
            if rank == 1 and turn == 5:
                torch.cuda.synchronize()
                os.kill(os.getpid(), signal.SIGKILL)
            if turn == 5:
                torch.cuda.synchronize()
                start = time.monotonic()
            try:
                dist.all_reduce(x)
                torch.cuda.synchronize()
            except ringfort.PeerLostError as exc:
                torch.cuda.synchronize()
                return time.monotonic() - start, str(exc)
    raise AssertionError("nothing was raised")


def late(rank: int, world_size: int) -> str:
    """Rank 1 does not come: the error names it."""
    with group(rank, world_size, timeout=2.0):
        if rank == 1:
            time.sleep(4)
            return ""

        error = raised(lambda: dist.all_reduce(torch.ones(100, device="cuda")))
        assert isinstance(error, ringfort.OperationTimeoutError), error
        return str(error)


def mismatch(rank: int, world_size: int) -> str:
    """Ranks with other sizes; of which the first chunks are the same."""
    with group(rank, world_size):
        x = torch.ones(5_000_000 + rank * 1_000_000, device="cuda")
        work = None

        def call() -> None:
            nonlocal work
            work = dist.all_reduce(x, async_op=True)
            work.wait()

        error = raised(call)
        assert isinstance(error, ringfort.CollectiveMismatchError), error
        assert work is not None
        torch.cuda.synchronize()
        while not work.is_completed():
            time.sleep(0.001)
        assert not work.is_success()
        return str(error)


def captured(rank: int, world_size: int) -> str:
    """Into a graph nothing fits that goes over the network."""
    with group(rank, world_size):
        x = torch.ones(100, device="cuda")
        graph = torch.cuda.CUDAGraph()
        error: Any = None
        with torch.cuda.graph(graph):
            x += 1
            error = raised(lambda: dist.all_reduce(x))
        dist.all_reduce(x)
        return str(error)


def mixed(rank: int, world_size: int) -> None:
    """Rank 1 has no GPU, and the same tensors in the host's memory."""
    if rank == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = "cpu" if rank == 1 else "cuda"
    assert torch.cuda.is_available() == (rank != 1)
    with group(rank, world_size):
        for count in (3, 10_000_000):
            x = torch.full((count,), rank + 1.0, device=device)
            dist.all_reduce(x)
            assert x.unique().tolist() == [3.0]
            out = torch.empty(count * world_size, device=device)
            dist.all_gather_into_tensor(out, torch.full((count,), float(rank), device=device))
            assert out[::count].tolist() == [0.0, 1.0]
            if rank == 0:
                dist.send(x, 1)
            else:
                dist.recv(x, 0)
                assert x[-1] == 3.0


# --- programs ---------------------------------------------------------------------------------------------------------


def plain(rank: int, world_size: int) -> None:
    """Without torch's calls: on a context."""
    with group(rank, world_size) as pg:
        ctx = pg.context
        for count in (0, 5, 9_000_000):
            x = torch.full((count,), rank + 1.0, device="cuda")
            assert gpu_all_reduce(ctx, x) is x
            assert x.unique().tolist() == [3.0] * bool(count)
            assert gpu_all_reduce(ctx, x, ringfort.ReduceOp.MEAN) is x
            assert x.unique().tolist() == [3.0] * bool(count)
            y = torch.full((count,), float(rank), device="cuda", dtype=torch.float16)
            work = gpu_broadcast(ctx, y, 1, async_op=True)
            work.wait()
            assert y.unique().tolist() == [1.0] * bool(count)
        error = raised(lambda: gpu_all_reduce(ctx, torch.ones(3)))
        assert isinstance(error, ringfort.UnsupportedArrayError), error
        error = raised(lambda: gpu_broadcast(ctx, x, 9))
        assert isinstance(error, ringfort.InvalidRankError), error


def _train(wrapped: Any, parts: list[int], steps: int = 5) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(steps):
        texts = []
        for part in parts:
            random = torch.Generator().manual_seed(100 * step + part)
            texts.append(torch.randint(0, 64, (4, 17), generator=random))
        text = torch.cat(texts).cuda()
        loss = torch.nn.functional.cross_entropy(wrapped(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def trained(rank: int, world_size: int, how: str) -> float:
    """A model that learns by DDP or a strategy of sharding; returns how far it is from one process with all data."""
    torch.use_deterministic_algorithms(False)
    with group(rank, world_size):
        mine = model().cuda()
        if how == "ddp":
            wrapped: Any = torch.nn.parallel.DistributedDataParallel(mine)
        else:
            wrapped = shard(mine, how)
        _train(wrapped, [rank])
        alone = model().cuda()
        _train(alone, list(range(world_size)))
        state = (wrapped.module if how == "ddp" else wrapped).state_dict()
        return max(float((whole(state[name]) - value).abs().max()) for name, value in alone.state_dict().items())
