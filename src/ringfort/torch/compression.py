"""Compression in torch: a communication hook for DDP and a reduce-scatter for FSDP2.

    model.register_comm_hook(None, ringfort.torch.compress_hook("auto"))
    ringfort.torch.compress_reduce_scatter(sharded_model, "int8")

Both need a process group of Ringfort's. What compression loses in one step is added to the next (error feedback). The
compressor that holds it is an attribute of the hook, and what `compress_reduce_scatter` returns; save it with a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import proxy

from ringfort.backends.group import Group
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.plan import Operation
from ringfort.collectives.signature import Collective
from ringfort.compression import collective as compressed
from ringfort.compression.collective import Compression, compressor_of
from ringfort.compression.compressor import GradientCompressor
from ringfort.compression.strategy import Method
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.torch.cuda import CudaEngine
from ringfort.torch.host_copies import HostCopies
from ringfort.torch.names import dist, torch
from ringfort.torch.operations import Arrays, Call, Kind
from ringfort.torch.tensors import to_op
from ringfort.torch.work import RingfortWork


def compress_hook(compression: Compression = "auto") -> Callable[[Any, Any], Any]:
    """Return a hook that averages gradients with lossy compression, for
    `DistributedDataParallel.register_comm_hook(state, hook)`.

    `state` is the process group, or None for the default one. `"auto"` chooses `int4` at most, which costs Adam some of
    its progress; `"auto(0.05)"` chooses `int8` at most. The hook's attribute `compressor` is the `GradientCompressor`;
    it numbers parameters in the order in which they first come, the same in every run of the same model.

    Raises `InvalidArgumentError` for an unknown strategy, and from the backward pass for a group that is not
    Ringfort's; torch passes that on, and `NonFiniteError`, as a `RuntimeError`.
    """
    compressor = compressor_of(compression, error_feedback=True)
    names: dict[int, str] = {}

    def hook(state: Any, bucket: Any) -> Any:
        context = _context_of(state)
        tensors = [
            (names.setdefault(id(parameter), f"parameter {len(names)}"), tuple(parameter.shape))
            for parameter in bucket.parameters()
        ]
        buffer = bucket.buffer()
        call = Call(_all_reduce(compressor, tensors, context), [buffer], [buffer], ReduceOp.MEAN)
        return issue(context, call, is_async=True).get_future().then(_first)

    # Torch checks annotations, and does not take the text that they are here for its types.
    hook.__annotations__ = {}
    hook.compressor = compressor  # pyright: ignore[reportFunctionMemberAccess]
    return hook


def compress_reduce_scatter(model: Any, compression: Compression = "int8") -> GradientCompressor:
    """Let every FSDP2 module of `model` (see `fully_shard`) quantize the gradients that it sends: `fp16`, `bf16`,
    `int8`, `int4` or `onebit`. Returns the compressor.

    Raises `InvalidArgumentError` for a model without such modules, and for other strategies, which need whole tensors.
    """
    compressor = compressor_of(compression, error_feedback=True)
    if compressor.strategy.method not in (Method.NONE, Method.QUANTIZE):
        why = "a reduce-scatter can only quantize: fp16, bf16, int8, int4, onebit"
        raise InvalidArgumentError("compression", str(compressor.strategy), why)
    sharded = [(name, part) for name, part in model.named_modules() if hasattr(part, "set_custom_reduce_scatter")]
    if not sharded:
        raise InvalidArgumentError("model", type(model).__name__, "no FSDP2 module found; call fully_shard() first")
    for name, part in sharded:
        part.set_custom_reduce_scatter(_ReduceScatter(compressor, name or "model"))
    return compressor


class _ReduceScatter:
    """Replaces torch's `ReduceScatter` for the gradients of one FSDP2 module."""

    def __init__(self, compressor: GradientCompressor, name: str) -> None:
        self._compressor, self._name = compressor, name

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        """Return memory for the gradients, and then for this rank's part of them."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        context = _context_of(group)
        kind = _reduce_scatter(self._compressor, self._name, context)
        call = Call(kind, [input_tensor.detach()], [output_tensor.detach()], to_op(op), result=[output_tensor])
        work = issue(context, call, is_async=async_op)
        return work if async_op else None


def _first(future: Any) -> Any:
    return future.value()[0]


# --- through host memory ----------------------------------------------------------------------------------------------


class _ScatterKind(Kind):
    """A reduce-scatter of one tensor, which has the parts of all ranks."""

    @property
    def has_any_sizes(self) -> bool:
        return True

    def make(self, group: Group, call: Call, inputs: Arrays, outputs: Arrays, seconds: float) -> Operation:
        return self.prepare(group, inputs[0], outputs[0], call.op, timeout=seconds)

    def parts(self, rank: int, world_size: int) -> tuple[int, Sequence[int], Sequence[int]]:
        return 2, (0,), (1,)


def _all_reduce(
    compressor: GradientCompressor, tensors: Sequence[tuple[str, tuple[int, ...]]], context: DistributedContext
) -> Kind:
    def prepare(group: Group, x: Any, *, op: Op, timeout: float) -> Operation:
        return compressed.all_reduce(
            group, x, op, compression=compressor, tensors=tensors, timeout=timeout, metrics=context.metrics
        )

    return Kind(Collective.ALL_REDUCE, prepare, reduces=True, is_whole=True)


def _reduce_scatter(compressor: GradientCompressor, name: str, context: DistributedContext) -> Kind:
    def prepare(group: Group, x: Any, into: Any, op: Op, *, timeout: float) -> Operation:
        return compressed.reduce_scatter(
            group, x, into, op, compression=compressor, name=name, timeout=timeout, metrics=context.metrics
        )

    return _ScatterKind(Collective.REDUCE_SCATTER, prepare, reduces=True, is_whole=True)


def issue(context: DistributedContext, call: Call, *, is_async: bool) -> RingfortWork:
    """Run a compressed collective. Tensors of a GPU go through pinned memory, and their copies run in streams beside
    the caller's; those of other devices are copied."""
    seconds, results, as_work = context.group.check_timeout(None), call.results, RingfortWork
    engine = None if call.device.type == "cpu" else _engine(context, call.device)
    if isinstance(engine, CudaEngine):
        return engine.issue([call], seconds, is_async=is_async)
    if engine is not None:
        [call], as_work = engine.moved([call])
    work = context.issue(call.operation(context.group, seconds), is_async)
    return as_work(results, work if is_async else None)


def _engine(context: DistributedContext, device: Any) -> CudaEngine | HostCopies:
    """Return what copies between the device and the host. Not the process group's, which may be another library's for
    this device."""
    name = f"compressed {device.type}"
    if name not in context.stages:
        # A proxy: the context must not hold itself.
        made = CudaEngine(proxy(context)) if device.type == "cuda" else HostCopies(device)
        context.stages.setdefault(name, made)
    return context.stages[name]


def _context_of(group: Any) -> DistributedContext:
    group = dist.group.WORLD if group is None else group
    context = getattr(group, "context", None)
    if not isinstance(context, DistributedContext):
        what = "no default group" if group is None else f"a group of {type(group).__name__}"
        raise InvalidArgumentError("state", what, 'compression needs dist.init_process_group("ringfort")')
    return context
