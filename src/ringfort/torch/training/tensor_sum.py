"""`TensorSum`: the gradients of a torch model, added up over micro-batches in one flat tensor per element type.

Torch calls a hook as soon as it has the gradient of a parameter. The hook moves that into the flat tensor, so `grad` is
None between micro-batches. In the last micro-batch of a step each bucket is reduced as soon as its gradients are there,
while torch computes the others.

Beside the gradients, the sum has what the members must agree on for a step: which parameters were used (an optimizer
passes over a parameter without a gradient), and how far the model's buffers, such as the statistics of BatchNorm, have
moved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.torch.cuda import CudaDevice
from ringfort.torch.names import torch
from ringfort.torch.training.inspector import Inspector
from ringfort.torch.training.memory import check_memory, has_room
from ringfort.torch.training.model_buffers import ModelBuffers
from ringfort.torch.training.reduction import Reduction
from ringfort.torch.training.staging import DeviceStaging, HostStaging, Sizes
from ringfort.training.elastic.digests import Inspection
from ringfort.training.elastic.local_sum import Gradient, Layout
from ringfort.training.elastic.memory_needs import MemoryNeeds, gradient_bytes
from ringfort.training.elastic.sample_order import Array

_log = logging.getLogger(__name__)

BUCKET: Final = 8 << 20
"""Bytes of a bucket: long enough to fill the wire, short enough to begin early."""
_KINDS: Final = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""The type in which gradients of each type are added up: that of `LocalSum`."""


class TensorSum:
    """The local sum of one member. Only for the program's thread, except the hooks."""

    _words = 0
    """Numbers behind the flags that say which parameters were used."""

    def __init__(
        self,
        names: dict[Any, str],
        optimizer: Any,
        buffers: ModelBuffers,
        *,
        overlaps: bool,
        state_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`names` are those of the model's parameters. `state_bytes` returns the size of the state."""
        self._names = names
        self._optimizer = optimizer
        self._buffers = buffers
        self._overlaps = overlaps
        self._state_bytes = state_bytes
        self.parameters: list[Any] = []
        """Those that are trained, in the order of the layout."""
        self._handles: list[Any] = []
        self._is_open = False
        self._factor = 1.0
        self._loss: Any = 0.0
        self.count = 0.0
        self.weight = 0.0
        """That of the current micro-batch."""
        self.is_scaled = False
        """Whether the gradients of the current micro-batch come from `backward`, which scales them."""
        self._arrived: set[int] = set()
        """The gradients of the current micro-batch, as places in the layout."""
        self._reduction: Reduction | None = None
        self._error: Exception | None = None
        self._inspection: Inspection | None = None
        self._inspector = Inspector()
        self.refresh()

    # --- the layout ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Lay out the gradients, if other parameters are trained than before: all members do that in the same step."""
        wanted = {one for group in self._optimizer.param_groups for one in group["params"] if one.requires_grad}
        parameters = [one for one in self._names if one in wanted]
        if self.parameters and list(map(id, parameters)) == list(map(id, self.parameters)):  # tensors compare elements
            return
        if not parameters:
            raise InvalidArgumentError("optimizer", type(self._optimizer).__name__, "no parameter is trained")
        self.close()
        self.parameters = parameters
        self._lay_out()
        self._watch()

    def _watch(self) -> None:
        """Be told of gradients as soon as they are there."""
        for place, parameter in enumerate(self.parameters, self._first):
            handle = parameter.register_post_accumulate_grad_hook(partial(self._accumulated, place))
            self._handles.append(handle)

    def _lay_out(self) -> None:
        used = Gradient("used", "float32", (len(self.parameters) + self._words,))
        buffers = [Gradient(f"buffers[{name!r}]", kind, shape) for name, kind, shape in self._buffers.described()]
        gradients = [self._described(parameter) for parameter in self.parameters]
        self._first = 1 + len(buffers)
        """The place of the first parameter's gradient."""
        every = (used, *buffers, *gradients)
        # The order of keys is the order of the layout.
        self.layout: Layout | None = Layout(every, {one.path: None for one in every}, BUCKET)
        device = self._device()
        self.host_copies = 3 if device.type == "cpu" else 2
        """The sum, and the results of the last step and of the next."""
        on_devices = self._on_devices(device)
        self.device_bytes = sum(on_devices.values())
        check_memory(self.memory, on_devices)
        self.staging = self._new_staging(device, self.layout.sizes)
        self.device_bytes += sum(flat.nbytes for flat in self.staging.results.values())
        self._views = self._cut(self.staging.flats)
        self._result_views = self._cut(self.staging.results) if self.staging.results else []
        self._beside = dict.fromkeys(self.layout.sizes, 0)
        """Elements of each type that are no gradients; they come first."""
        for one in every[: self._first]:
            self._beside[_KINDS[one.kind]] += one.size
        self._touched = [False] * len(every)
        self._buckets = self.layout.buckets()

    @property
    def memory(self) -> MemoryNeeds:
        """What the run takes beside the program's own."""
        assert self.layout is not None
        return MemoryNeeds.of(self.layout, self._state_bytes(), self.host_copies, self.device_bytes)

    def _on_devices(self, device: Any) -> dict[Any, int]:
        """Return the bytes of the sums on devices other than the host."""
        assert self.layout is not None
        return {} if device.type == "cpu" else {device: gradient_bytes(self.layout)}

    def _device(self) -> Any:
        """Return where gradients are added up: of several devices the host does it."""
        devices = {one.device for one in self.parameters}
        return next(iter(devices)) if len(devices) == 1 else torch.device("cpu")

    def _new_staging(self, device: Any, sizes: Sizes) -> HostStaging | DeviceStaging:
        if device.type == "cpu":
            return HostStaging(sizes)
        if device.type != "cuda":
            return DeviceStaging(device, sizes)
        return DeviceStaging(device, sizes, CudaDevice(device), has_results=has_room(device, self._on_devices(device)))

    def _described(self, parameter: Any) -> Gradient:
        kind = str(parameter.dtype).removeprefix("torch.")
        name = self._names[parameter]
        if kind not in _KINDS:
            raise InvalidArgumentError("model", name, f"is {kind}; only {', '.join(_KINDS)} can be trained elastically")
        return Gradient(f"gradients[{name!r}]", kind, tuple(parameter.shape))  # pyright: ignore[reportArgumentType]

    def _cut(self, flats: dict[str, Any]) -> list[Any]:
        """Return the part of each leaf of the layout."""
        assert self.layout is not None
        used, views = dict.fromkeys(flats, 0), list[Any]()
        for one in self.layout.gradients:
            kind = _KINDS[one.kind]
            views.append(flats[kind][used[kind] : used[kind] + one.size].view(one.shape))
            used[kind] += one.size
        return views

    def fits(self, layout: Layout) -> bool:
        """Return whether that is this model's layout."""
        return self.layout == layout

    def prepare(self, layout: Layout) -> None:
        """Raise `GradientLayoutError` if the run's layout is not this model's."""
        assert self.layout is not None
        self.layout.check(layout)

    # --- one micro-batch ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin another step, of which something will be added."""
        self.clear()

    def clear(self) -> None:
        """Begin another step, with nothing. What was not added to is zero in the reduction."""
        self.count, self._loss = 0.0, 0.0
        self._touched = [False] * len(self._touched)

    def open(self, weight: float) -> None:
        """A micro-batch begins, whose gradients count with `weight` if torch computes them unscaled."""
        self._is_open, self._factor, self.weight, self._error = True, weight, weight, None
        self.is_scaled = False
        self._arrived.clear()
        self._buffers.restore()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Leave no gradient in the parameters, in those that are not trained either."""
        for parameter in self._names:
            parameter.grad = None

    def backward(self, loss: Any, weight: float, scale: Callable[[Any], Any], **options: Any) -> None:
        """Compute the gradients of a micro-batch from its mean loss, which counts with `weight`."""
        self.weight, self.is_scaled = weight, True
        if not weight:  # the mean over nothing may be NaN
            return
        self._factor = 1.0
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()
        try:
            scale(loss * weight).backward(**options)
        except BaseException as exc:
            why = (
                f"has failed with {type(exc).__name__}, so the gradients of this batch are incomplete; end the program"
            )
            self._error = InvalidArgumentError("run.backward", type(loss).__name__, why)
            raise
        self._loss = self._loss + loss.detach() * weight

    def end(self) -> None:
        """The micro-batch is whole. Raise what has failed in a hook."""
        self._is_open = False
        if self._error is not None:
            raise self._error
        self._buffers.take_moves(self._add, self.weight)
        self.count += self.weight

    @property
    def has_gradients(self) -> bool:
        """Whether the gradients of the current micro-batch were computed."""
        return self.is_scaled or bool(self._arrived)

    @property
    def loss(self) -> float:
        """The weighted sum of the losses. (On a GPU it is known when the gradients are.)"""
        return float(self._loss)

    def _accumulated(self, place: int, parameter: Any) -> None:
        """In the thread of torch's backward: a gradient is there."""
        if not self._is_open:
            return  # not of the run: the program may look at gradients by itself
        gradient, parameter.grad = parameter.grad.detach(), None
        is_first = place not in self._arrived
        self._arrived.add(place)
        if not is_first and self._overlaps:  # from now on; usually this is noticed before anything was overlapped
            _log.info("%s gets several gradients per batch, so overlap=False holds", self._names[parameter])
            self._overlaps = False
        if self._reduction is not None and not self._reduction.is_free(place):
            why = "got two gradients for one batch, the second after the first was sent; pass overlap=False"
            self._error = InvalidArgumentError("model", self._names[parameter], why)
            return
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if self._factor != 1.0:
            gradient = gradient * self._factor
        self._add(place, gradient)
        if self._reduction is not None and is_first:
            self._reduction.arrived(place)

    def _add(self, place: int, values: Any) -> None:
        if self._touched[place]:
            self._views[place].add_(values)
        else:
            self._views[place].copy_(values)
            self._touched[place] = True

    # --- the reduction ------------------------------------------------------------------------------------------------

    def expect(self, context: DistributedContext) -> None:
        """The next micro-batch is the last before `reduce`."""
        if self._overlaps and self._reduction is None:
            self._reduction = self._new_reduction(context)

    def _new_reduction(self, context: DistributedContext) -> Reduction:
        return Reduction(context, self._buckets, self.staging, self._inspector)

    def forget(self) -> None:
        """The epoch has ended. What was begun fails by itself, or is for nobody."""
        self._reduction = None

    def reduce(self, context: DistributedContext) -> dict[str, Array]:
        """Add up the sums of all members, bucket by bucket."""
        reduction = self._reduction or self._new_reduction(context)
        self._reduction = None
        for place, is_touched in enumerate(self._touched):
            if place and not is_touched:
                self._views[place].zero_()
        total = reduction.finish(self._note_used)
        self._inspection = reduction.inspection
        return total

    def _note_used(self, bucket: Array) -> None:
        """Write which parameters were used: that is at the beginning of its bucket."""
        used = self._touched[self._first :]
        bucket[: len(used)] = used

    def inspection(self) -> Inspection | None:
        """Return what was looked at of the last result while it came."""
        found, self._inspection = self._inspection, None
        return found

    def own(self) -> dict[str, Array]:
        """Return this member's sums, as they were reduced."""
        return self.staging.own()

    # --- results ------------------------------------------------------------------------------------------------------

    def gradients_of(self, payload: dict[str, Array]) -> Iterator[Array]:
        """Yield the gradients in a result, without what else is in it."""
        for kind, size in self._beside.items():
            yield payload[kind][size:]

    def load(self, payload: dict[str, Array], factor: float, moves_factor: float) -> tuple[list[Any], list[Any]]:
        """Write a result times `factor` to where the optimizer reads it: the local sum is not needed any more. Return
        the gradient of each parameter, None for one that no member has used; and the move of each buffer times
        `moves_factor`."""
        loaded = self.staging.load(payload, factor, self._beside, moves_factor)
        views = self._views if loaded is self.staging.flats else self._result_views
        return self._used(payload, views), views[1 : self._first]

    def lend(self, payload: dict[str, Array]) -> tuple[list[Any], list[Any]]:
        """Return what `load` returns for factors of 1, in the memory of the result."""
        views = self._cut({kind: torch.from_numpy(payload[kind]) for kind in self.staging.flats})
        return self._used(payload, views), views[1 : self._first]

    def _used(self, payload: dict[str, Array], views: list[Any]) -> list[Any]:
        used = payload["float32"][: len(self.parameters)].tolist()
        return [
            _laid_out_like(parameter, view.to(parameter.dtype)) if is_used > 0 else None
            for view, parameter, is_used in zip(views[self._first :], self.parameters, used, strict=True)
        ]

    def close(self) -> None:
        """Remove the hooks, and end what goes on beside the program."""
        if self.parameters:
            self.staging.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _laid_out_like(parameter: Any, gradient: Any) -> Any:
    """Return a gradient in the memory format of its parameter, such as channels last: fused optimizers go through the
    memory of both."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
