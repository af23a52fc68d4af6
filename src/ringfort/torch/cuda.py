"""Tensors on GPUs: `CudaEngine` for a process group; `gpu_all_reduce` and `gpu_broadcast` for any `DistributedContext`,
without a torch process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any
from weakref import proxy

from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.work import Work
from ringfort.context import DistributedContext
from ringfort.errors import BackendUnavailableError, InvalidArgumentError, UnsupportedArrayError
from ringfort.telemetry.step_time import Phase, is_service_thread
from ringfort.telemetry.trace import own_trace
from ringfort.torch.hooks import untraced
from ringfort.torch.names import torch
from ringfort.torch.operations import Call, all_reduce, broadcast, by_engine
from ringfort.torch.staging import Stage, StagedCall
from ringfort.torch.tensors import flatten, is_plain, to_array
from ringfort.torch.work import RingfortWork, Several


class CudaDevice:
    """A GPU of this process as staging needs it: streams beside the caller's, events and pinned memory."""

    def __init__(self, device: Any) -> None:
        self.check()
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def current(self) -> Any:
        """Return the caller's stream."""
        return torch.cuda.current_stream(self.device.index)  # torch takes microseconds to parse a device

    def check(self) -> None:
        """Raise `InvalidArgumentError` while the caller captures a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            why = "a CUDA graph cannot contain a collective over the network; call it outside torch.cuda.graph"
            raise InvalidArgumentError("tensor", "of a graph that is being captured", why)

    def stream(self) -> Any:
        """Return a stream beside the caller's."""
        return torch.cuda.Stream(self.device)

    def record(self, stream: Any) -> Any:
        """Return an event after all that is in `stream` now. A host thread that waits for it sleeps."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def pinned(self, size: int) -> Any:
        """Return host memory that the GPU reads and writes by itself."""
        # The device is given because a program may have set another default.
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, stream: Any, into: Any, source: Any) -> None:
        """Copy in `stream`."""
        if stream == self.current():
            into.copy_(source, non_blocking=True)
            return
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)

    def keep(self, tensor: Any, stream: Any) -> None:
        """Keep the memory of `tensor`, even after its last reference is gone, until `stream` has done what is in it by
        then."""
        tensor.record_stream(stream)

    def future(self) -> Any:
        """Return a future that knows about streams."""
        return torch.futures.Future(devices=[self.device])


@untraced
class CudaWork(RingfortWork):
    """A call whose result is there after an event of the device."""

    def __init__(
        self, device: Any, ended: Callable[[], Any], tensors: Sequence[Any], work: Work, source: int | None = None
    ) -> None:
        """`ended` returns the event after which nothing touches the tensors any more; None while the work is under
        way. `source` is the rank that a message comes from."""
        super().__init__(tensors, work, source)
        self._device, self._ended = device, ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the network has done its part, as with Gloo, and raise what it raised. Then the current stream
        waits for the rest."""
        try:
            return super().wait(timeout)
        finally:
            ended = self._ended()
            if ended is not None:
                self._device.current().wait_event(ended)

    def is_completed(self) -> bool:
        """Return whether the result is there, or an error."""
        return super().is_completed() and (self.exception() is not None or self._ended().query())

    def block_current_stream(self) -> None:
        """Do the same as `wait`."""
        self.wait()

    def _new_future(self) -> Any:
        """Return a future that knows about streams: whoever waits for it makes its current stream wait."""
        return self._device.future()


@untraced
class _StagedWork(CudaWork):
    """A collective through host memory."""

    def __init__(self, staged: StagedCall, device: Any, tensors: Sequence[Any], work: Work) -> None:
        super().__init__(device, lambda: staged.ended, tensors, work)
        self._staged = staged

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._work is None or self._work.is_completed():
            return super().wait(timeout)
        start = perf_counter()
        try:
            return super().wait(timeout)
        finally:
            _leave_out_kernels(start, self._staged.ready_at)


def _leave_out_kernels(start: float, ready_at: float | None) -> None:
    """Of the time since `start`, in which this thread has waited for a collective, take that out of the step's exchange
    in which the GPU has computed what the collective sends."""
    if ready_at is not None and ready_at > start and not is_service_thread():
        own_trace().time.add(Phase.EXCHANGE, start - ready_at)


class CudaEngine:
    """Serves the tensors of one group that are on GPUs."""

    def __init__(
        self, context: DistributedContext, *, chunk_bytes: int | None = None, make: Callable[[Any], Any] = CudaDevice
    ) -> None:
        """With `chunk_bytes` 0 other ranks may have the same tensors in host memory. `make` opens a device."""
        self._context, self._chunk_bytes, self._make = context, chunk_bytes, make
        self._stages: dict[Any, Stage] = {}

    def stage(self, device: Any) -> Stage:
        """Return the stage of one GPU."""
        if device not in self._stages:
            self._stages[device] = Stage(self._context, self._make(device), chunk_bytes=self._chunk_bytes)
        return self._stages[device]

    def issue(self, calls: Sequence[Call], seconds: float, *, is_async: bool) -> RingfortWork:
        """Begin the calls; unless `is_async`, return when the network has done its part, in the caller's thread if
        possible. Raises what is wrong."""
        works: list[RingfortWork] = []
        for call in calls:
            stage = self.stage(call.device)
            staged = StagedCall(stage, call, seconds, is_alone=not is_async)
            if is_async:
                work = self._context.issue(staged.whole, True)
                works.append(_StagedWork(staged, stage.device, call.results, work))
                continue
            start = perf_counter()
            try:
                self._context.issue(staged.whole, False)
            finally:
                _leave_out_kernels(start, staged.ready_at)
                if staged.ended is not None:
                    stage.device.current().wait_event(staged.ended)
            works.append(RingfortWork(call.results))
        return works[0] if len(works) == 1 else Several(works)

    # A message is one piece, so that the peer may have its tensor in host memory.

    def outgoing(self, tensor: Any) -> tuple[Any, Callable[[], object], Callable[..., RingfortWork]]:
        """Begin to copy `tensor` to the host. Return the copy, a function that blocks until it is complete, and one
        that makes torch's work of the one that sends it."""
        stage, source = self.stage(tensor.device), flatten(tensor)
        device, stream = stage.device, stage.sending
        device.check()
        copy = device.pinned(source.numel() * source.element_size()).view(source.dtype)
        stream.wait_event(device.record(device.current()))
        device.keep(source, stream)
        device.copy(stream, copy, source)
        copied = device.record(stream)
        return to_array(copy), copied.synchronize, partial(CudaWork, device, lambda: copied, [tensor])

    def incoming(self, tensor: Any) -> tuple[ArrayView, Callable[..., RingfortWork]]:
        """Return a view to receive in, which copies itself to `tensor` when it is finished; and a function that makes
        torch's work of the one that receives."""
        stage, place = self.stage(tensor.device), flatten(tensor)
        device, stream = stage.device, stage.receiving
        device.check()
        memory = device.pinned(place.numel() * place.element_size()).view(place.dtype)
        issued = device.record(device.current())
        for one in (tensor, place):
            device.keep(one, stream)
        ended: list[Any] = []

        def finish() -> None:
            """Copy to the device, in the thread that has received the message."""
            stream.wait_event(issued)
            device.copy(stream, place, memory)
            if not is_plain(tensor):
                device.copy(stream, tensor.detach(), place.view(tensor.dtype).view(tensor.shape))
            ended.append(device.record(stream))

        view = as_view(to_array(memory))
        as_work = partial(CudaWork, device, lambda: ended[0] if ended else None, [tensor])
        return ArrayView(view.flat, view.kind, finish=finish), as_work

    def shutdown(self) -> None:
        """Release the pinned memory."""
        self._stages.clear()


# --- without a process group ------------------------------------------------------------------------------------------


def gpu_all_reduce(
    ctx: DistributedContext, tensor: Any, op: Op = ReduceOp.SUM, *, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Reduce `tensor` over all ranks, in place, by NCCL where the backend has it; return it, or with `async_op` a work.

    All ranks pass a tensor on a GPU. This function, or the work's `wait`, blocks until the network has done its part;
    the current stream waits for the copy that is left. Raises `BackendUnavailableError` without CUDA.
    """
    return _issue(ctx, tensor, all_reduce(tensor, op), timeout, async_op)


def gpu_broadcast(
    ctx: DistributedContext, tensor: Any, root: int = 0, *, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Copy the root's `tensor` to all ranks, in place; the rest as `gpu_all_reduce`."""
    return _issue(ctx, tensor, broadcast(tensor, root, is_root=ctx.rank == root), timeout, async_op)


def _issue(ctx: DistributedContext, tensor: Any, call: Call, timeout: float | None, async_op: bool) -> Any:
    if not torch.cuda.is_available():
        how = (
            "it needs an NVIDIA GPU and a torch built for CUDA (pip install torch, on Linux); "
            "for tensors on the CPU, use all_reduce and broadcast of the context"
        )
        raise BackendUnavailableError("CUDA", how)
    if not getattr(tensor, "is_cuda", False):
        where = f"tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise UnsupportedArrayError("tensor", where, "must be on a GPU; for others, use the methods of the context")
    seconds = ctx.group.check_timeout(timeout)
    ctx.group.check_rank(call.root, "root")
    operation = by_engine(ctx.group, call, timeout)
    if operation is not None:
        return ctx.issue(operation, async_op)
    if "cuda" not in ctx.stages:
        ctx.stages["cuda"] = CudaEngine(proxy(ctx))  # a proxy: the context must not hold itself
    work = ctx.stages["cuda"].issue([call], seconds, is_async=async_op)
    return work if async_op else tensor
