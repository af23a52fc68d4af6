"""What the ranks of the tests here do, by name: `Zygote.run(NAME, world_size)`. Each raises if anything is wrong."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

import ringfort
from ringfort.torch.process_group import RingfortProcessGroup
from ringfort.torch.work import RingfortWork
from ringfort.transport.machine import Machine

C10D: Any = torch._C._distributed_c10d
# Their names since torch 2.13, and before.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def group(rank: int, world_size: int, backend: str = "ringfort", timeout: float = 30.0) -> Iterator[Any]:
    """The default group, met through a file; destroyed in the end, however that comes."""
    store = dist.FileStore(os.environ["STORE"] + backend.replace(":", "-"), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def raised(action: Callable[[], Any]) -> BaseException:
    """What `action` raises."""
    try:
        action()
    except BaseException as exc:
        return exc
    raise AssertionError("nothing was raised")


# --- collectives ------------------------------------------------------------------------------------------------------

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def _mine(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 5 + rank + 1).to(dtype)


def _all(world_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [_mine(rank, shape, dtype) for rank in range(world_size)]


def collectives(rank: int, world_size: int) -> None:
    """Every collective, against what it must give, for every element type and some shapes."""
    with group(rank, world_size):
        for shape in ((), (0,), (3, 4)):
            for dtype in DTYPES if shape == (3, 4) else (torch.float32, torch.bfloat16):
                _reductions(rank, world_size, shape, dtype)
                _movements(rank, world_size, shape, dtype)
        for dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn):
            _movements(rank, world_size, (6,), dtype)
        _not_contiguous(rank, world_size)
        _objects(rank, world_size)


def _reductions(rank: int, n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    every = torch.stack(_all(n, shape, dtype)).to(torch.float64)
    for op, expected in (
        (dist.ReduceOp.SUM, every.sum(0)),
        (dist.ReduceOp.PRODUCT, every.prod(0)),
        (dist.ReduceOp.MIN, every.min(0).values),
        (dist.ReduceOp.MAX, every.max(0).values),
    ):
        x = _mine(rank, shape, dtype)
        dist.all_reduce(x, op=op)
        torch.testing.assert_close(x, expected.to(dtype))
        x = _mine(rank, shape, dtype)
        dist.reduce(x, dst=n - 1, op=op)
        torch.testing.assert_close(x, expected.to(dtype) if rank == n - 1 else _mine(rank, shape, dtype))
        parts = [_mine(rank, shape, dtype) + part for part in range(n)]
        into = torch.empty(shape, dtype=dtype)
        dist.reduce_scatter(into, parts, op=op)
        mine = torch.stack([_mine(other, shape, dtype) + rank for other in range(n)]).to(torch.float64)
        wanted = {
            dist.ReduceOp.SUM: lambda m=mine: m.sum(0),
            dist.ReduceOp.PRODUCT: lambda m=mine: m.prod(0),
            dist.ReduceOp.MIN: lambda m=mine: m.min(0).values,
            dist.ReduceOp.MAX: lambda m=mine: m.max(0).values,
        }[op]().to(dtype)
        torch.testing.assert_close(into, wanted)
        single = torch.empty(shape, dtype=dtype)
        reduce_scatter_single(single.view(-1), torch.cat([part.reshape(-1) for part in parts]), op=op)
        torch.testing.assert_close(single, wanted)
    if dtype.is_floating_point:
        x = _mine(rank, shape, dtype)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(x, every.mean(0).to(dtype))
        x = _mine(rank, shape, dtype)
        dist.all_reduce(x, op=C10D._make_nccl_premul_sum(0.5))
        torch.testing.assert_close(x, (every * 0.5).sum(0).to(dtype))
    else:
        x = _mine(rank, shape, dtype)
        dist.all_reduce(x, op=dist.ReduceOp.BOR)
        expected = _mine(0, shape, dtype)
        for other in range(1, n):
            expected |= _mine(other, shape, dtype)
        assert torch.equal(x, expected)


def _movements(rank: int, n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def same(x: torch.Tensor, y: torch.Tensor) -> None:
        assert x.dtype == y.dtype
        assert torch.equal(x.float() if dtype.itemsize == 1 else x, y.float() if dtype.itemsize == 1 else y), (x, y)

    mine, every = _mine(rank, shape, dtype), _all(n, shape, dtype)
    x = mine.clone()
    dist.broadcast(x, src=n - 1)
    same(x, every[n - 1])
    places = [torch.zeros(shape, dtype=dtype) for _ in range(n)]
    dist.all_gather(places, mine)
    for place, expected in zip(places, every, strict=True):
        same(place, expected)
    single = torch.zeros((n, *shape), dtype=dtype).view(-1)
    all_gather_single(single, mine.view(-1))
    same(single, torch.cat([part.view(-1) for part in every]))
    places = [torch.zeros(shape, dtype=dtype) for _ in range(n)] if rank == 1 else []
    dist.gather(mine, places or None, dst=1)
    for place, expected in zip(places, every, strict=False):
        same(place, expected)
    into = torch.zeros(shape, dtype=dtype)
    dist.scatter(into, every if rank == 1 else None, src=1)
    same(into, mine)
    places = [torch.zeros(shape, dtype=dtype) for _ in range(n)]
    dist.all_to_all(places, [mine.clone() for _ in range(n)])
    for place, expected in zip(places, every, strict=True):
        same(place, expected)
    if shape == (6,):
        rows = torch.arange(n * (n + 1) // 2).to(dtype)  # r + 1 rows for rank r
        into = torch.zeros((rank + 1) * n, dtype=dtype)
        dist.all_to_all_single(into, rows, [rank + 1] * n, list(range(1, n + 1)))
        start = rank * (rank + 1) // 2
        same(into, rows[start : start + rank + 1].repeat(n))
        even = torch.zeros(2 * n, dtype=dtype)
        dist.all_to_all_single(even, torch.full((2 * n,), rank + 1).to(dtype))
        same(even, torch.arange(1, n + 1).repeat_interleave(2).to(dtype))


def _not_contiguous(rank: int, n: int) -> None:
    whole = torch.zeros(4, 6)
    x = whole.t()[::2]
    x += rank + 1
    dist.all_reduce(x)
    assert torch.equal(whole.t()[::2], torch.full((3, 4), n * (n + 1) / 2))
    assert not whole.t()[1::2].any()
    places = [torch.zeros(6, 2).t() for _ in range(n)]
    dist.all_gather(places, torch.full((6, 2), float(rank)).t())
    assert [int(place[1, 2]) for place in places] == list(range(n))
    x = torch.ones(3, requires_grad=True)
    dist.broadcast(x.data, 0)
    with torch.no_grad():
        dist.all_reduce(x)
    assert x.tolist() == [n] * 3


def _objects(rank: int, n: int) -> None:
    every: list[Any] = [None] * n
    dist.all_gather_object(every, {"rank": rank, "name": "x" * rank})
    assert every == [{"rank": other, "name": "x" * other} for other in range(n)]
    some: list[Any] = [rank, "two"] if rank == 0 else [None, None]
    dist.broadcast_object_list(some, src=0)
    assert some == [0, "two"]
    one: list[Any] = [None]
    dist.scatter_object_list(one, list(range(n)) if rank == 0 else None, src=0)
    assert one == [rank]


def old_names(rank: int, world_size: int) -> None:
    """The methods by the names they had before torch 2.13, and as people call them by hand."""
    with group(rank, world_size) as pg:
        n = world_size
        into = torch.zeros(2 * n)
        pg._allgather_base(into, torch.full((2,), float(rank))).wait()
        assert into.tolist() == [float(r) for r in range(n) for _ in range(2)]
        part = torch.zeros(2)
        pg._reduce_scatter_base(part, torch.ones(2 * n), C10D.ReduceScatterOptions()).wait()
        assert part.tolist() == [n, n]
        into = torch.zeros(n)
        pg.alltoall_base(into, torch.full((n,), float(rank)), [], [], C10D.AllToAllOptions()).wait()
        assert into.tolist() == list(range(n))
        into = torch.zeros(n)
        pg.allgather_into_tensor_coalesced([into], [torch.full((1,), float(rank))]).wait()
        assert into.tolist() == list(range(n))
        pg.reduce_scatter_tensor_coalesced([part], [torch.ones(2 * n)]).wait()
        x = torch.ones(3)
        pg.allreduce(x).wait()
        pg.allreduce([x], dist.ReduceOp.MAX).wait()
        pg.broadcast(x, 0, timeout=timedelta(seconds=5)).wait()
        pg.barrier().wait()
        places = [torch.zeros(3) for _ in range(n)]
        pg.allgather(places, x).wait()
        assert places[-1].tolist() == [n] * 3
        lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(n)]
        pg.allgather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((1,), -float(rank))]).wait()
        assert lists[1][1].item() == -1


def coalesced(rank: int, world_size: int) -> None:
    """Several calls as one."""
    n = world_size
    with group(rank, n) as pg:
        tensors = [torch.full((size,), float(rank + 1)) for size in (1, 0, 1000)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert tensors[2][-1] == n * (n + 1) / 2
        outs = [torch.zeros(n * 3), torch.zeros(n)]
        with dist._coalescing_manager():
            for out in outs:
                all_gather_single(out, torch.full((out.numel() // n,), float(rank)))
        assert outs[1].tolist() == list(range(n))
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            one, two = torch.zeros(2), torch.full((2,), float(rank))
            dist.broadcast(two, 1)
            dist.irecv(one, (rank - 1) % n)
            dist.isend(torch.full((2,), float(rank)), (rank + 1) % n)
        manager.wait()
        assert one[0] == (rank - 1) % n
        assert two[0] == 1
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, two, (rank + 1) % n), dist.P2POp(dist.irecv, one, (rank - 1) % n)]
        )
        for work in works:
            work.wait()
        assert one[0] == 1
        assert pg._get_sequence_number_for_group() > 0


# --- messages ---------------------------------------------------------------------------------------------------------


def messages(rank: int, world_size: int) -> None:
    """Tags, order, a rank's own messages, large ones both ways at once, and from any source."""
    n = world_size
    after, before = (rank + 1) % n, (rank - 1) % n
    with group(rank, n):
        # Received in another order than they were sent, by tag; in the same order within a tag.
        works = [
            dist.isend(torch.full((3,), float(10 * tag + turn)), after, tag=tag) for tag in (1, 2) for turn in (0, 1)
        ]
        got = []
        for tag in (2, 1):
            for _ in range(2):
                x = torch.zeros(3)
                assert dist.recv(x, before, tag=tag) == before
                got.append(int(x[0]))
        assert got == [20, 21, 10, 11]
        for work in works:
            work.wait()
        # Every rank sends eight MiB before any rank receives.
        big, into = torch.full((2_000_000,), float(rank)), torch.zeros(2_000_000)
        receiving, sending = dist.irecv(into, before), dist.isend(big, after)
        sending.wait()
        receiving.wait()
        assert into[-1] == before
        x = torch.zeros(2)
        sending, receiving = dist.isend(torch.ones(2), rank), dist.irecv(x, rank)
        receiving.wait()
        assert x.tolist() == [1, 1]
        receiving = dist.irecv(x, rank, tag=5)
        dist.isend(torch.full((2,), 7.0), rank, tag=5).wait()
        receiving.wait()
        assert x.tolist() == [7, 7]
        dist.barrier()
        if rank == 0:
            seen = []
            for _ in range(n - 1):
                x = torch.zeros(300_000)
                src = dist.recv(x, tag=9)
                assert int(x[-1]) == src
                seen.append(src)
            assert sorted(seen) == list(range(1, n))
            work = dist.irecv(torch.zeros(1), tag=10)
            work.wait()
            assert work._source_rank() == 1
        else:
            dist.send(torch.full((300_000,), float(rank)), 0, tag=9)
            if rank == 1:
                dist.send(torch.zeros(1), 0, tag=10)


def any_source_may_be_lost(rank: int, world_size: int) -> str:
    """Rank 0 waits for any source; one peer is killed meanwhile, and another sends."""
    with group(rank, world_size):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            assert isinstance(raised(lambda: dist.recv(torch.zeros(1), 1)), ringfort.PeerLostError)
            dist.send(torch.ones(1), 0)
        if rank == 0:
            assert dist.recv(torch.zeros(1)) == 2
            # Rank 2 may have closed its group before this rank has read the end of rank 1's connection.
            assert isinstance(raised(lambda: dist.recv(torch.zeros(1), 1)), ringfort.PeerLostError)
            return str(raised(lambda: dist.recv(torch.zeros(1))))
    return ""


# --- groups -----------------------------------------------------------------------------------------------------------


def sub_groups(rank: int, world_size: int) -> None:
    """Groups of some ranks, in any order, and twins; used at once."""
    assert world_size == 3
    with group(rank, 3) as world:
        pair = dist.new_group([0, 2], group_desc="the outer two")
        twin = dist.new_group([2, 0])
        in_order = "sort_ranks" in inspect.signature(dist.new_group).parameters  # torch 2.7 sorts them
        turned = dist.new_group([2, 1, 0], **({"sort_ranks": False} if in_order else {}))
        x = torch.full((1,), float(rank))
        if rank != 1:
            assert isinstance(pair, RingfortProcessGroup)
            assert dist.get_backend(pair) == "ringfort"
            assert pair.group_desc == "the outer two"
            assert pair.group_name != twin.group_name
            first, second = x.clone(), 10 * x
            works = [
                dist.all_reduce(first, group=pair, async_op=True),
                dist.all_reduce(second, group=twin, async_op=True),
            ]
            for work in reversed(works):
                work.wait()
            assert (first.item(), second.item()) == (2, 20)
            assert pair.context.backend.parent is world.context.backend
        places = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(places, x, group=turned)
        assert [int(place) for place in places] == ([2, 1, 0] if in_order else [0, 1, 2])
        assert turned.rank() == (2 - rank if in_order else rank)
        dist.broadcast(x, src=2, group=turned)
        assert x.item() == 2
        # Only its members make it.
        alone = dist.new_group([2, 0], use_local_synchronization=True) if rank != 1 else None
        if alone is not None:
            y = torch.ones(1)
            dist.all_reduce(y, group=alone)
            assert y.item() == 2
        if rank != 1:
            dist.destroy_process_group(pair)
            y = torch.ones(1)
            dist.all_reduce(y, group=twin)
            assert y.item() == 2


def beside_gloo(rank: int, world_size: int) -> None:
    """A group of ours where the default is another's."""
    with group(rank, world_size, "gloo"):
        ours = dist.new_group(list(range(1, world_size)), backend="ringfort")
        if rank:
            x = torch.ones(1)
            dist.all_reduce(x, group=ours)
            assert x.item() == world_size - 1
            assert dist.get_backend(ours) == "ringfort"
        dist.barrier()


def not_recorded(rank: int, world_size: int) -> None:
    """As torch 2.15, whose flight recorder raises for groups of other engines than its own."""
    recorded: list[Any] = []
    dist.distributed_c10d._maybe_attach_flight_recorder = lambda pg, config, ranks: recorded.append(pg)  # type: ignore[attr-defined]
    with group(rank, world_size, "ringfort") as pg:
        for one in (pg, dist.new_group(list(range(world_size)))):
            dist.distributed_c10d._maybe_attach_flight_recorder(one, None, [])  # type: ignore[attr-defined]
    dist.distributed_c10d._maybe_attach_flight_recorder("another", None, [])  # type: ignore[attr-defined]
    assert recorded == ["another"]


def by_device(rank: int, world_size: int) -> None:
    """Named for one device among others."""
    with group(rank, world_size, "cpu:ringfort,meta:gloo") as pg:
        assert isinstance(pg, RingfortProcessGroup)
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == world_size
        assert {device.type for device in pg._device_types} == {"cpu", "meta"}
        assert pg._get_backend(torch.device("cpu")) is pg
        # There is no other device here; the work, or the error of an older torch, is not ours: another engine got it.
        try:
            work = dist.all_reduce(torch.ones(1, device="meta"), async_op=True)
        except NotImplementedError:
            pass
        else:
            assert not isinstance(work, RingfortWork)
            work.wait()
        assert isinstance(pg._get_backend(torch.device("meta")), dist.ProcessGroupGloo)


def as_backend(rank: int, world_size: int) -> str | None:
    """From torch 2.14 on an engine may be written in Python as well: our methods are what that asks for."""
    try:
        type("Empty", (C10D.Backend,), {})(rank, world_size)
    except TypeError as exc:
        return str(exc)
    names = [name for name, what in vars(RingfortProcessGroup).items() if callable(what) and not name.startswith("__")]

    def forward(name: str) -> Callable[..., Any]:
        return lambda self, *arguments, **options: getattr(self.ours, name)(*arguments, **options)

    engine: Any = type("Engine", (C10D.Backend,), {name: forward(name) for name in names})
    create = import_module("ringfort.torch.create").create

    def make(options: Any, _: Any) -> Any:
        made = engine(options.group_rank, options.group_size)
        made.ours = create(options)
        return made

    dist.Backend.register_backend("engine", make, extended_api=True, devices=["cpu"])
    with group(rank, world_size, "engine") as pg:
        assert not isinstance(pg, RingfortProcessGroup)
        assert type(pg._get_backend(torch.device("cpu"))) is engine
        _reductions(rank, world_size, (3, 4), torch.float32)
        _movements(rank, world_size, (3, 4), torch.float32)
        dist.barrier()
    return None


def meshes(rank: int, world_size: int) -> None:
    """DeviceMesh, functional collectives and DTensor."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    assert world_size == 4
    with group(rank, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        x = functional.all_reduce(torch.full((2,), float(rank)), "sum", (mesh, 1))
        assert functional.wait_tensor(x).tolist() == [[1, 1], [1, 1], [5, 5], [5, 5]][rank]
        gathered = functional.all_gather_tensor(torch.full((1, 2), float(rank)), 0, (mesh, 0))
        assert functional.wait_tensor(gathered)[:, 0].tolist() == [rank % 2, rank % 2 + 2]
        part = functional.reduce_scatter_tensor(torch.arange(4.0), "avg", 0, (mesh, 0))
        assert functional.wait_tensor(part).tolist() == ([0, 1] if rank < 2 else [2, 3])
        whole = torch.arange(32.0).reshape(8, 4)
        tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert torch.equal(tensor.full_tensor(), whole)
        product = tensor @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate(), Shard(0)])
        torch.testing.assert_close(product.full_tensor(), whole @ whole.t())


# --- work -------------------------------------------------------------------------------------------------------------


def works(rank: int, world_size: int) -> None:
    """What torch and people ask of a work."""
    with group(rank, world_size) as pg:
        x = torch.ones(1000)
        work = dist.all_reduce(x, async_op=True)
        assert [tensor.data_ptr() for tensor in work.get_future().wait()] == [x.data_ptr()]
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.wait()
        assert x[0] == world_size
        assert [tensor.data_ptr() for tensor in work.result()] == [x.data_ptr()]
        # In the order in which they were issued, whoever waits for which.
        y = torch.ones(5)
        pending = [dist.all_reduce(y, async_op=True) for _ in range(10)]
        pending[-1].wait()
        assert y[0] == world_size**10
        dist.all_reduce(y, op=dist.ReduceOp.MAX)
        chained = dist.all_reduce(y, op=dist.ReduceOp.MIN, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
        assert chained.wait()[0] == 2 * world_size**10
        # It gives up waiting, not what is under way.
        late = dist.irecv(torch.zeros(1), (rank + 1) % world_size, tag=3)
        error = raised(lambda: late.wait(timedelta(milliseconds=50)))
        assert isinstance(error, ringfort.OperationTimeoutError), error
        assert not late.is_completed()
        assert not late.is_success()
        dist.barrier()  # nobody sends before all have given up
        dist.send(torch.ones(1), (rank - 1) % world_size, tag=3)
        late.wait()
        pg.set_timeout(timedelta(seconds=0.2))
        error = raised(lambda: dist.recv(torch.zeros(1), (rank + 1) % world_size, tag=4))
        assert isinstance(error, TimeoutError), error
        pg.set_timeout(timedelta(seconds=30))
        dist.barrier()


# --- what goes wrong --------------------------------------------------------------------------------------------------


def wrong_arguments(rank: int, world_size: int) -> list[str]:
    """Refused at the call, by name; and the group goes on."""
    x = torch.ones(3)
    with group(rank, world_size) as pg:
        errors = [
            raised(action)
            for action in (
                lambda: dist.all_gather([torch.zeros(2)] * world_size, x),
                lambda: dist.all_gather([torch.zeros(3)], x),
                lambda: all_gather_single(torch.zeros(3 * world_size + 1), x),
                lambda: dist.all_to_all_single(x.clone(), x, [1], [3]),
                lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG),
                lambda: dist.broadcast(torch.ones(3).to_sparse(), src=0),
                lambda: dist.all_reduce(torch.ones(3, device="meta")),
                lambda: pg.send([x], world_size, 0),
                lambda: pg.send([x], (rank + 1) % world_size, -1),
                lambda: pg.send([x, x], (rank + 1) % world_size, 0),
                lambda: pg.broadcast([x], world_size),
            )
        ]
        for error in errors:
            assert isinstance(error, ringfort.InvalidArgumentError), error
        dist.barrier()
    return [str(error) for error in errors]


def mismatch(rank: int, world_size: int) -> str:
    """Ranks that call different things; nobody hangs in the end either."""
    with group(rank, world_size):
        x = torch.ones(8)
        error = raised((lambda: dist.all_reduce(x)) if rank else (lambda: dist.broadcast(x, 0)))
        assert isinstance(error, ringfort.CollectiveMismatchError)
        return str(error)


def timeout(rank: int, world_size: int) -> str:
    """One rank does not come."""
    with group(rank, world_size, timeout=0.5):
        if rank == 0:
            error = raised(lambda: dist.all_reduce(torch.ones(1)))
            assert isinstance(error, TimeoutError)
            return str(error)
        time.sleep(1.5)  # the fault that is tested
    return ""


def missing(rank: int, world_size: int) -> str:
    """A monitored barrier, first with all and then without the last."""
    with group(rank, world_size) as pg:
        pg.monitored_barrier(timedelta(seconds=20))
        if rank == world_size - 1:
            assert isinstance(raised(lambda: dist.recv(torch.zeros(1), 0)), ringfort.TransportError)
            return ""
        error = raised(lambda: pg.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True))
        # At the others the time is over as well, or rank 0 has left before.
        assert isinstance(error, TimeoutError if rank == 0 else ringfort.DistributedError)
        return str(error)


def abort(rank: int, world_size: int) -> str:
    """One rank aborts; the others are in a collective."""
    with group(rank, world_size) as pg:
        dist.barrier()
        if rank == 0:
            pg.abort()
            return ""
        return str(raised(lambda: dist.all_reduce(torch.ones(1))))


def dropped(rank: int, world_size: int, finds: bool = False) -> tuple[str, object] | None:
    """Rank 0 drops its last reference to a group that torch's own lists do not hold, as torchft does, and lives on.
    `finds`: the ranks meet by `ringfort://`. No garbage collection helps."""
    from ringfort.config import DistributedConfig
    from ringfort.context import DistributedContext
    from ringfort.torch.create import form
    from ringfort.torch.init_method import meet
    from ringfort.torch.linked_store import links_of

    gc.disable()
    if finds:
        store, rank, _ = next(iter(meet("ringfort://?world_size=2", timedelta(seconds=30))))
        context = DistributedContext(links_of(store))
    else:
        store = dist.FileStore(os.environ["STORE"], world_size)
        context = DistributedContext(form(store, rank, world_size, DistributedConfig(timeout=30)))
    pg = RingfortProcessGroup(store, context, 30)
    del context
    pg.allreduce([torch.ones(4)]).wait()
    if rank == 0:
        pg.allreduce([torch.ones(4)]).wait()
        del pg
        store.wait(["told"])
        return None
    error: Any = raised(lambda: [pg.allreduce([torch.ones(4)]).wait() for _ in range(2)])
    store.set("told", "")
    pg.shutdown()
    return type(error).__name__, error.peer


def killed_in_backward(rank: int, world_size: int) -> tuple[float, float, str] | None:
    """The last rank is killed in the middle of DDP's backward. How long until the others raise, and until they have
    destroyed the group; and what was raised."""
    from torch.nn.parallel import DistributedDataParallel

    class Killer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            if armed and rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return grad

    armed = False
    layers = [torch.nn.Linear(256, 256) for _ in range(6)]
    context = group(rank, world_size, timeout=60.0)
    context.__enter__()
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.2)
    for step in range(4):
        armed = step == 3
        dist.barrier()
        start = time.monotonic()
        # The last layers' gradients are on their way when the first layers' are computed.
        handle = layers[2].register_forward_hook(lambda _m, _i, out: Killer.apply(out))
        try:
            model(torch.randn(4, 256)).sum().backward()
        except BaseException as exc:
            took = time.monotonic() - start
            dist.destroy_process_group()
            return took, time.monotonic() - start, f"{type(exc).__name__}: {exc}"
        finally:
            handle.remove()
    raise AssertionError("nobody noticed")


def again(rank: int, world_size: int) -> None:
    """A second default group after the first was destroyed."""
    for turn in range(3):
        store = dist.FileStore(f"{os.environ['STORE']}-{turn}", world_size)
        dist.init_process_group("ringfort", store=store, rank=rank, world_size=world_size)
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == world_size
        dist.destroy_process_group()
    assert not dist.is_initialized()


# --- training ---------------------------------------------------------------------------------------------------------


def _transformer() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(64, 32),
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        torch.nn.Linear(32, 64),
    )


def _curve(model: torch.nn.Module, rank: int, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(100 + rank)
    losses: list[float] = []
    for _ in range(steps):
        # Numbers that count up by one or two: there is something to learn.
        start = torch.randint(0, 64, (8, 1), generator=random)
        stride = torch.randint(1, 3, (8, 1), generator=random)
        text = (start + stride * torch.arange(17)) % 64
        loss = torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp_curve(rank: int, world_size: int, backend: str, steps: int) -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    with group(rank, world_size, backend):
        return _curve(DistributedDataParallel(_transformer()), rank, steps)


def fsdp_curve(rank: int, world_size: int, backend: str, steps: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with group(rank, world_size, backend):
        mesh = init_device_mesh("cpu", (world_size,))
        model: Any = _transformer()
        for layer in model[1].layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return _curve(model, rank, steps)


def steps(rank: int, world_size: int) -> int:
    """Each step of an optimizer counts; one that is compiled works."""
    from ringfort.telemetry.trace import own_trace

    with group(rank, world_size):
        before = own_trace().step
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        for _ in range(before + 2):
            optimizer.step()
        counted = own_trace().step - before
        other = torch.nn.Parameter(torch.ones(3))
        other.grad = torch.ones(3)
        torch.compile(torch.optim.SGD([other], lr=0.5).step, backend="eager")()
        assert other[0].item() == 0.5
        return counted


# --- rendezvous -------------------------------------------------------------------------------------------------------


def discovered(rank: int, world_size: int) -> tuple[int, float, str]:
    """No rank and no address: the processes find each other. Twice; and groups of them use torch's store."""
    for query in (f"world_size={world_size}", f"min_peers={world_size - 1}&timeout=30"):
        dist.init_process_group("ringfort", init_method=f"ringfort://?{query}", timeout=timedelta(seconds=30))
        total = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        store = dist.distributed_c10d._get_default_store()
        store.add("met", 1)
        pair = dist.new_group([0, 1], backend="gloo")  # which meets through the store
        if dist.get_rank() < 2:
            dist.barrier(group=pair)
        store.set(f"key {dist.get_rank()}", "x" * 100)
        store.wait([f"key {other}" for other in range(world_size)], timedelta(seconds=20))
        assert store.get("key 0") == b"x" * 100
        dist.barrier()
        found = dist.get_rank(), total.item(), type(dist.group.WORLD.context.backend).__name__
        met = store.add("met", 0)
        assert met == world_size, met
        dist.barrier()
        dist.destroy_process_group()
    return found


def nobody(rank: int, world_size: int) -> str:
    """Nobody else is there."""
    error = raised(lambda: dist.init_process_group("ringfort", init_method="ringfort://?world_size=2&timeout=0.5"))
    assert isinstance(error, ringfort.RendezvousTimeoutError)
    return str(error)


def another_machine(rank: int, world_size: int) -> list[str]:
    """Two ranks that take each other to be on different machines, so that rank 1 looks for a way to rank 0. Returns
    whom rank 0 turned away."""
    import logging

    import ringfort.torch.create as creating

    away: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: away.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringfort").addHandler(handler)
    creating.machine_for = lambda _: Machine(bytes([rank]) * 16)  # type: ignore[assignment]
    with group(rank, world_size):
        dist.barrier()
    return away


def plaintext(rank: int, world_size: int) -> list[str]:
    """Groups of several engines while the launcher has said that rank 1 is on another machine."""
    import logging

    from ringfort.torch.plaintext import watch

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringfort").addHandler(handler)
    if rank == 0:
        watch("0:1")
    with group(rank, world_size):
        dist.new_group([0], backend="gloo")  # does not leave the machine
        assert not said, said
        dist.new_group([1], backend="gloo")  # is none of rank 0's
        assert not said, said
        for _ in range(2):
            dist.new_group(backend="gloo")
    return said


def no_rank_0(rank: int, world_size: int) -> list[str]:
    """Rank 1 of two alone; and options that are nobody's."""

    def start(options: Any) -> None:
        place = {"store": dist.FileStore(os.environ["STORE"], 2), "rank": 1, "world_size": 2}
        dist.init_process_group("ringfort", **place, timeout=timedelta(seconds=0.3), pg_options=options)

    missing, refused = raised(lambda: start(None)), raised(lambda: start({"shm": "off"}))
    assert isinstance(missing, ringfort.RendezvousTimeoutError), missing
    assert isinstance(refused, ringfort.InvalidArgumentError), refused
    return [str(missing), str(refused)]


def bad_urls(rank: int, world_size: int) -> list[str]:
    urls = ["ringfort://host:1234", "ringfort://?worldsize=2", "ringfort://?timeout=soon", "ringfort://?world_size=0x"]
    errors = [raised(lambda url=url: dist.init_process_group("ringfort", init_method=url)) for url in urls]
    errors.append(raised(lambda: dist.init_process_group("ringfort", init_method="ringfort://", rank=0, world_size=2)))
    assert all(isinstance(error, ringfort.ConfigError) for error in errors), errors
    return [str(error) for error in errors]


def _agent() -> tuple[Any, Any]:
    """An agent's part of `torchrun --nnodes=2 --rdzv-backend=ringfort`, and what it got in the first round."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from ringfort.torch.torchrun import RingfortRendezvous

    agent = RingfortRendezvous(RendezvousParameters("ringfort", "", "test", 2, 2, join_timeout=30))
    return agent, agent.next_rendezvous()


def agents_leave(rank: int, world_size: int) -> float:
    """The first agent owns the store. It is done first, and the other still sends requests."""
    agent, info = _agent()
    if info.rank == 0:
        info.store.wait(["last"])
    else:
        info.store.set("last", "here")
        for _ in range(40):
            assert info.store.check(["last"])
    start = time.monotonic()
    assert agent.shutdown()
    return time.monotonic() - start


def owner_is_lost(rank: int, world_size: int) -> list[str] | None:
    """The machine that owns the store leaves while the other waits for a key; then the other sends a request."""
    agent, info = _agent()
    if info.rank == 0:
        info.store.wait(["asking"])
        agent._node.close()
        return None
    info.store.set("asking", "")
    start = time.monotonic()
    errors = [raised(lambda: info.store.get("never")), raised(lambda: info.store.add("number", 1))]
    assert all(isinstance(error, ringfort.PeerLostError) for error in errors), errors
    assert agent.num_nodes_waiting() in (0, 1)
    assert agent.shutdown()
    assert time.monotonic() - start < 5
    return [str(error) for error in errors]
