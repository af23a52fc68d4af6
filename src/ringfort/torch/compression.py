"""Compression in torch: a communication hook for DDP and a reduce-scatter for FSDP2.

    model.register_comm_hook(None, ringfort.torch.compress_hook("auto"))
    ringfort.torch.compress_reduce_scatter(sharded_model, "int8")

Both need a process group of Ringfort's. What compression loses in one step is added to the next (error feedback). The
compressor that holds it is an attribute of the hook, and what `compress_reduce_scatter` returns; save it with a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringfort.collectives.ops import ReduceOp
from ringfort.compression.collective import Compression, compressor_of
from ringfort.compression.compressor import GradientCompressor
from ringfort.compression.strategy import Method
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import dist, torch
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
        host = buffer if buffer.is_cpu else buffer.cpu()
        work = context.all_reduce_compressed(host.detach(), ReduceOp.MEAN, compressor, tensors, async_op=True)

        def copy_back(future: Any) -> Any:
            averaged = future.value()[0]
            return averaged if averaged is buffer else buffer.copy_(averaged)

        return RingfortWork([host], work).get_future().then(copy_back)

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
        source, place = input_tensor.detach(), output_tensor.detach()
        on_host = place if place.is_cpu else torch.empty_like(place, device="cpu")
        found = context.reduce_scatter_compressed(
            source.cpu(), on_host, to_op(op), self._compressor, name=self._name, async_op=async_op and place.is_cpu
        )
        if not place.is_cpu:
            place.copy_(on_host)
        return RingfortWork([output_tensor], found if async_op and place.is_cpu else None) if async_op else None


def _context_of(group: Any) -> DistributedContext:
    group = dist.group.WORLD if group is None else group
    context = getattr(group, "context", None)
    if not isinstance(context, DistributedContext):
        what = "no default group" if group is None else f"a group of {type(group).__name__}"
        raise InvalidArgumentError("state", what, 'compression needs dist.init_process_group("ringfort")')
    return context
