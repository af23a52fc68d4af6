"""`gpu_all_reduce` and `gpu_broadcast`: tensors on a GPU over any `DistributedContext`, without a torch process group.

They use NCCL where the backend has it, and host memory elsewhere.
"""

from __future__ import annotations

from typing import Any
from weakref import proxy

from ringfort.collectives.ops import Op, ReduceOp
from ringfort.context import DistributedContext
from ringfort.errors import BackendUnavailableError, UnsupportedArrayError
from ringfort.torch.cuda import CudaEngine
from ringfort.torch.names import torch
from ringfort.torch.operations import Call, all_reduce, broadcast, by_engine


def gpu_all_reduce(
    ctx: DistributedContext,
    tensor: Any,
    op: Op = ReduceOp.SUM,
    *,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce `tensor` over all ranks, in place; return it, or with `async_op` a work.

    All ranks pass a tensor on a GPU. This function, or the work's `wait`, blocks until the network has done its part;
    the current stream waits for the copy that is left. Raises `BackendUnavailableError` without CUDA.
    """
    _check(ctx, tensor, timeout)
    return _issue(ctx, all_reduce(tensor, op), timeout, async_op)


def gpu_broadcast(
    ctx: DistributedContext, tensor: Any, root: int = 0, *, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Copy the root's `tensor` to all ranks, in place; the rest as `gpu_all_reduce`."""
    _check(ctx, tensor, timeout)
    return _issue(ctx, broadcast(tensor, root, is_root=ctx.rank == root), timeout, async_op)


def _check(ctx: DistributedContext, tensor: Any, timeout: float | None) -> None:
    if not torch.cuda.is_available():
        how = (
            "it needs an NVIDIA GPU and a torch built for CUDA (pip install torch, on Linux); "
            "for tensors on the CPU, use all_reduce and broadcast of the context"
        )
        raise BackendUnavailableError("CUDA", how)
    if not getattr(tensor, "is_cuda", False):
        where = f"tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise UnsupportedArrayError("tensor", where, "must be on a GPU; for others, use the methods of the context")
    ctx.group.check_timeout(timeout)


def _issue(ctx: DistributedContext, call: Call, timeout: float | None, async_op: bool) -> Any:
    ctx.group.check_rank(call.root, "root")
    operation = by_engine(ctx.group, call, timeout)
    if operation is not None:
        return ctx.issue(operation, async_op)
    if not ctx.stages:
        ctx.stages["cuda"] = CudaEngine(proxy(ctx))  # a proxy: the context must not hold itself
    seconds = ctx.config.timeout if timeout is None else timeout
    work = ctx.stages["cuda"].issue([call], seconds, is_async=async_op)
    return work if async_op else call.results[0]
