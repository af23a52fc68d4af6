"""`gpu_all_reduce` and `gpu_broadcast`: tensors on a GPU over any `DistributedContext`, without a process group of
torch's. By NCCL where the backend has it, else through the host's memory."""

from __future__ import annotations

from typing import Any
from weakref import proxy

from ringfort.collectives import native
from ringfort.collectives.operation import Operation, check_root
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.context import DistributedContext
from ringfort.errors import BackendUnavailableError, UnsupportedArrayError
from ringfort.torch.cuda import begin, new_stage
from ringfort.torch.names import torch
from ringfort.torch.staging import Stage, Transfer
from ringfort.torch.streams import HOW, CudaDevice
from ringfort.torch.transfers import Transfers


def gpu_all_reduce(
    ctx: DistributedContext,
    tensor: Any,
    op: Op = ReduceOp.SUM,
    *,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Every rank's `tensor` becomes the reduction of all of them, in place; returns it, or with `async_op` a work.

    All ranks pass a tensor on a GPU. This, or the work's `wait`, blocks until the network has done its part; the
    current stream waits for the copy that is left. (With `RINGFORT_CUDA_WAIT=stream` it waits for all, and the host for
    nothing.) Raises `BackendUnavailableError` without CUDA.
    """
    _check(ctx, tensor, timeout)
    by_engine = native.all_reduce(ctx.backend, tensor, op, None, timeout) if _has_nccl(ctx) else None
    transfer = None if by_engine is not None else Transfers(ctx).all_reduce(tensor, op)
    return _issue(ctx, tensor, by_engine, transfer, timeout, async_op)


def gpu_broadcast(
    ctx: DistributedContext, tensor: Any, root: int = 0, *, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Every rank's `tensor` becomes the root's, in place; the rest as `gpu_all_reduce`."""
    _check(ctx, tensor, timeout)
    check_root(ctx.backend, root)
    by_engine = native.broadcast(ctx.backend, tensor, root, None, timeout) if _has_nccl(ctx) else None
    transfer = None if by_engine is not None else Transfers(ctx).broadcast(tensor, root)
    return _issue(ctx, tensor, by_engine, transfer, timeout, async_op)


def _check(ctx: DistributedContext, tensor: Any, timeout: float | None) -> None:
    if not torch.cuda.is_available():
        raise BackendUnavailableError("CUDA", HOW)
    if not getattr(tensor, "is_cuda", False):
        where = f"tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise UnsupportedArrayError("tensor", where, "is not on a GPU; the context's own methods take it as it is")
    ctx.backend.check_timeout(timeout)


def _has_nccl(ctx: DistributedContext) -> bool:
    engine = getattr(ctx.backend, "inside", None) or ctx.backend.native()
    return engine is not None and engine.tensors_on == "cuda"


def _issue(
    ctx: DistributedContext,
    tensor: Any,
    by_engine: Operation | None,
    transfer: Transfer | None,
    timeout: float | None,
    async_op: bool,
) -> Any:
    if by_engine is not None:
        return ctx.issue(by_engine, async_op)
    assert transfer is not None  # one of the two is there
    stages: dict[Any, Stage] = ctx.stages
    if tensor.device not in stages:
        # Not the context itself, which would then never end.
        stages[tensor.device] = new_stage(proxy(ctx), CudaDevice(tensor.device))
    stage, seconds = stages[tensor.device], ctx.config.timeout if timeout is None else timeout
    if async_op:
        return begin(stage, transfer, seconds)
    if stage.is_held:
        begin(stage, transfer, seconds).wait()
    else:
        stage.run(transfer, seconds)
    return tensor
