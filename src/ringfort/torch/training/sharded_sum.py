"""`ShardedSum`: the gradients of a model that is sharded over the local ranks of a machine.

When `backward` returns, torch has averaged the gradients of a micro-batch over the local ranks, and each rank has its
shard of them. The ranks add their shards up in one piece of shared memory, each in its own place. It has the layout of
an unsharded model, so machines with any number of local ranks can be members of one run. Local rank 0 reduces it with
the other machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch
from ringfort.torch.training.local_link import Leader, Link
from ringfort.torch.training.local_orders import Clear, Collect
from ringfort.torch.training.model_buffers import ModelBuffers
from ringfort.torch.training.shards import is_owner, local_part, place_of, sharded_like
from ringfort.torch.training.staging import HostStaging, Sizes
from ringfort.torch.training.tensor_sum import TensorSum
from ringfort.training.elastic.sample_order import Array

_NUMBERS: Final = 2
"""Numbers of each rank before the moves of its buffers: the weight of its samples, and the sum of their losses."""


class ShardedSum(TensorSum):
    """The sum of one machine, of which each local rank has its part. `overlaps` has no effect: a bucket would need the
    shards of all ranks."""

    def __init__(
        self,
        link: Link,
        model: Any,
        names: dict[Any, str],
        optimizer: Any,
        buffers: ModelBuffers,
        *,
        overlaps: bool,
        state_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._link = link
        self._outputs: list[Any] = []
        """What the model has returned in this micro-batch."""
        self._own_count = 0.0
        self._total_loss = 0.0
        super().__init__(names, optimizer, buffers, overlaps=False, state_bytes=state_bytes)
        self._model_hook = model.register_forward_hook(self._returned)

    # --- the layout ---------------------------------------------------------------------------------------------------

    def _device(self) -> Any:
        return torch.device("cpu")  # which the local ranks share

    def _on_devices(self, device: Any) -> dict[Any, int]:
        """Return the bytes of this rank's sums: those of its shards, where these are."""
        found = dict[Any, int]()
        for parameter in self.parameters:
            if parameter.device.type != "cpu":
                size = 8 if parameter.dtype is torch.float64 else 4
                found[parameter.device] = found.get(parameter.device, 0) + local_part(parameter).numel() * size
        return found

    def _new_staging(self, device: Any, sizes: Sizes) -> HostStaging:
        moves = sum(int(np.prod(shape)) for _, _, shape in self._buffers.described())
        rows = (self._link.size, _NUMBERS + moves)
        ends = np.cumsum([0, *(-(-size * np.dtype(kind).itemsize // 64) * 64 for kind, size in sizes.items())])
        total = int(ends[-1]) + rows[0] * rows[1] * 8
        memory = np.frombuffer(self._link.new_memory(total).memory, np.uint8)
        flats = {
            kind: torch.from_numpy(memory[begin:].view(np.uint8)[: size * np.dtype(kind).itemsize].view(kind))
            for (kind, size), begin in zip(sizes.items(), ends, strict=False)
        }
        self._rows = memory[int(ends[-1]) :].view(np.float64).reshape(rows)
        """For each local rank its numbers and the moves of its buffers."""
        return HostStaging(sizes, flats)

    def _lay_out(self) -> None:
        super()._lay_out()
        self._wholes = self._views
        """The memory that all ranks share."""
        mine, views, used = torch.from_numpy(self._rows[self._link.rank]), list[Any](), _NUMBERS
        for whole in self._wholes[1 : self._first]:
            views.append(mine[used : used + whole.numel()].view(whole.shape))
            used += whole.numel()
        self._parts = [
            whole[place_of(parameter)]
            for whole, parameter in zip(self._wholes[self._first :], self.parameters, strict=True)
        ]
        """The parts of this rank in that memory."""
        self._views = [
            self._wholes[0],
            *views,
            *(_sums_for(part, parameter) for part, parameter in zip(self._parts, self.parameters, strict=True)),
        ]

    def _watch(self) -> None:
        """The gradients are taken when `backward` has returned: then torch has averaged all of them."""

    # --- one micro-batch ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin another step. All ranks do, because they were given a micro-batch."""
        self._own_count, self._total_loss = 0.0, 0.0
        super().clear()

    def clear(self) -> None:
        """Begin another step, with nothing, at all ranks."""
        if isinstance(self._link, Leader):
            self._link.tell(Clear())
        self.begin()

    def open(self, weight: float) -> None:
        """A micro-batch begins."""
        self._outputs.clear()
        super().open(weight)

    def _returned(self, model: Any, arguments: Any, output: Any) -> None:
        if self._is_open and torch.is_grad_enabled():
            leaves = torch.utils._pytree.tree_leaves(output)
            self._outputs += [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]

    def backward(self, loss: Any, weight: float, scale: Callable[[Any], Any], **options: Any) -> None:
        """Compute the gradients of this rank's share of a micro-batch. Torch takes their mean over the ranks, and the
        sum is wanted."""
        outputs, self._outputs = self._outputs, []
        super().backward(loss, weight, lambda weighted: scale(weighted * self._link.size), **options)
        if weight:
            return
        # The others wait for the gradients of this rank, which are zeros. The mean over nothing may be NaN, and so
        # would be its gradients: so not from the loss, but from what it was computed of.
        nothing = [one.sum() * 0 for one in outputs if torch.isfinite(one).all()] or [loss * 0]
        torch.stack(nothing).sum().backward(**options)

    def end(self) -> None:
        """The micro-batch is whole: add this rank's shards up."""
        self._is_open = False
        if self._error is not None:
            raise self._error
        if not self.is_scaled:
            why = "a sharded model needs run.backward(loss): it weights the samples of the local ranks"
            raise InvalidArgumentError("loss.backward", "called by the program", why)
        for place, parameter in enumerate(self.parameters, self._first):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if is_owner(parameter):
                self._add(place, local_part(gradient))
            self._touched[place] = True
        self._buffers.take_moves(self._add, self.weight)
        self._own_count += self.weight

    def _add(self, place: int, values: Any) -> None:
        super()._add(place, values.to(self._views[place].device))

    @property
    def has_gradients(self) -> bool:
        """Whether the micro-batch has gradients."""
        return any(parameter.grad is not None for parameter in self.parameters)

    @property
    def loss(self) -> float:
        """The weighted sum of the losses of all ranks, known after `reduce`."""
        return self._total_loss

    # --- the reduction ------------------------------------------------------------------------------------------------

    def deposit(self) -> None:
        """Complete this rank's part of the shared memory."""
        for place, (view, is_touched) in enumerate(zip(self._views, self._touched, strict=True)):
            if place and not is_touched and (place < self._first or is_owner(self.parameters[place - self._first])):
                view.zero_()
        for view, part, parameter in zip(self._views[self._first :], self._parts, self.parameters, strict=True):
            if view is not part and is_owner(parameter):
                part.copy_(view)
        self._rows[self._link.rank, :_NUMBERS] = self._own_count, float(self._loss)

    def reduce(self, context: DistributedContext) -> dict[str, Array]:
        """Add up the sums of all machines, at local rank 0, once the other local ranks have written theirs."""
        assert isinstance(self._link, Leader)
        self._link.tell(Collect())
        self.deposit()
        self._link.wait()
        rows = self._rows.sum(axis=0)
        self.count, self._total_loss = (float(value) for value in rows[:_NUMBERS])
        begin = _NUMBERS
        for whole in self._wholes[1 : self._first]:
            whole.copy_(torch.from_numpy(rows[begin : begin + whole.numel()]).view(whole.shape))
            begin += whole.numel()
        return super().reduce(context)

    # --- results ------------------------------------------------------------------------------------------------------

    def put(self, payload: dict[str, Array]) -> None:
        """Write a result into the shared memory, for all ranks: the local sums are not needed any more."""
        for kind, flat in self.staging.own().items():
            flat[...] = payload[kind]

    def load(self, payload: dict[str, Array], factor: float, moves_factor: float) -> tuple[list[Any], list[Any]]:
        """Return this rank's shards of the gradients, as DTensors, and the moves of the buffers. All ranks read the
        result at the same time, so it stays as it is."""
        used = self.staging.own()["float32"][: len(self.parameters)]
        gradients = [
            sharded_like(parameter, (part.to(parameter.device) * factor).to(parameter.dtype)) if is_used > 0 else None
            for part, parameter, is_used in zip(self._parts, self.parameters, used, strict=True)
        ]
        return gradients, [move * moves_factor for move in self._wholes[1 : self._first]]

    def lend(self, payload: dict[str, Array]) -> tuple[list[Any], list[Any]]:
        """Return what `load` returns for factors of 1. The memory of the result is local rank 0's alone."""
        return self.load(payload, 1.0, 1.0)

    def release(self) -> None:
        """Give the model back."""
        self._model_hook.remove()


def _sums_for(part: Any, parameter: Any) -> Any:
    """Return where a rank adds up its shards: in the shared memory, or on the device that the parameter is on."""
    if parameter.device.type == "cpu":
        return part
    return torch.zeros(part.shape, dtype=part.dtype, device=parameter.device)
