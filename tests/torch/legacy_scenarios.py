"""What torch's group methods take beside what `torch.distributed` passes: the ranks of tests; see `scenarios`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.torch.scenarios import group, raised


def values(tensors: Any) -> list[Any]:
    return [tensor.tolist() for tensor in tensors]


def keywords(rank: int, world_size: int, backend: str) -> list[Any]:
    """Torch's names of the arguments."""
    with group(rank, world_size, backend) as pg:
        x, places = torch.tensor([1.0 + rank]), [torch.zeros(1) for _ in range(world_size)]
        mine = places if rank == 1 else []
        every = [torch.tensor([10.0 * part + rank]) for part in range(world_size)]
        out, limit = torch.zeros(1), timedelta(seconds=20)
        found: list[Any] = []
        pg.broadcast(tensor := x.clone(), root=1, timeout=limit).wait()
        found.append(tensor.tolist())
        pg.allreduce(tensor=(tensor := x.clone()), op=dist.ReduceOp.MAX).wait()
        found.append(tensor.tolist())
        pg.reduce(tensor=(tensor := x.clone()), root=1, op=dist.ReduceOp.PRODUCT).wait()
        found.append(tensor.tolist() if rank == 1 else None)  # Gloo leaves something else elsewhere
        pg.allgather(output_tensors=places, input_tensor=x, timeout=limit).wait()
        found.append(values(places))
        pg.gather(output_tensors=mine, input_tensor=x + 5, root=1).wait()
        found.append(values(mine))
        pg.scatter(output_tensor=out, input_tensors=every if rank == 1 else [], root=1).wait()
        found.append(out.tolist())
        pg.reduce_scatter(output=out, input=every, op=dist.ReduceOp.MAX, timeout=limit).wait()
        found.append(out.tolist())
        wide = torch.zeros(world_size)
        pg.alltoall_base(
            output=wide, input=torch.cat(every), output_split_sizes=[], input_split_sizes=[], timeout=limit
        ).wait()
        found.append(wide.tolist())
        for call in (lambda: pg.allreduce(x, roots=1), lambda: pg.broadcast(x, tensor=x, root=0)):
            assert isinstance(raised(call), TypeError)
        return found


def several(rank: int, world_size: int, backend: str) -> list[Any]:
    """Several tensors per rank, tensors that share memory, and none at all."""
    with group(rank, world_size, backend) as pg:
        found: list[Any] = []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            pair = [torch.tensor([2.0 * rank + 1]), torch.tensor([2.0 * rank + 2])]
            options = dist.AllreduceOptions()
            options.reduceOp = op
            pg.allreduce(pair, options).wait()
            found.append(values(pair))
        for index in range(2):
            pair = [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])]
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 1, index
            pg.broadcast(pair, options).wait()
            found.append(values(pair))
        lists = [[torch.zeros(1) for _ in range(2 * world_size)] for _ in range(2)]
        pg.allgather(lists, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])]).wait()
        found += [values(places) for places in lists]
        x = torch.tensor([1.0 + rank])
        dist.all_reduce_coalesced([x, x])
        found.append(x.tolist())
        x = torch.arange(4.0) + rank
        dist.all_reduce_coalesced([x[:3], x[1:]])
        found.append(x.tolist())
        for call in (lambda: pg.allreduce([]), lambda: pg.allreduce_coalesced([]), lambda: pg.broadcast([])):
            raised(call)
        return found


def sparse(rank: int, world_size: int, backend: str) -> list[Any]:
    """Sparse tensors, and the gradients of an embedding."""
    with group(rank, world_size, backend):
        found: list[Any] = []
        for values in (torch.tensor([1.0, 2.0]), torch.ones(2, 3)):
            shape = (world_size + 2, *values.shape[1:])
            x = torch.sparse_coo_tensor([[rank, world_size]], values, shape)
            dist.all_reduce(x)
            found.append(x.to_dense().tolist())
        x = torch.sparse_coo_tensor(torch.zeros(1, rank, dtype=torch.int64), torch.ones(rank), (3,))  # rank 0: none
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        found.append(work.result()[0].to_dense().tolist())
        torch.manual_seed(0)
        table = torch.nn.Embedding(10, 3, sparse=True)
        DistributedDataParallel(table)(torch.tensor([rank, 3])).sum().backward()
        found.append(table.weight.grad.to_dense().tolist())
        return found


def sparse_refused(rank: int, world_size: int) -> list[str]:
    """What cannot be added, in words; then the group goes on."""
    with group(rank, world_size):
        x = torch.sparse_coo_tensor([[0]], [1.0], (2 + rank,))
        words = [str(raised(lambda: dist.all_reduce(x))), str(raised(lambda: dist.all_reduce(x, dist.ReduceOp.MAX)))]
        dist.barrier()
        return words
