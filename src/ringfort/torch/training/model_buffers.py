"""`ModelBuffers`: buffers that a model changes while it computes, such as the statistics of BatchNorm.

Every micro-batch starts from the values of the last sealed step, whoever computes it. How far it has moved them is
added up like a gradient, and all members apply the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch

Kind = Literal["float32", "float64"]


class ModelBuffers:
    """The buffers of a model that are part of its state. Those that are not are the program's own."""

    def __init__(self, model: Any) -> None:
        kept = set(model.state_dict())
        self._buffers = [
            _Buffer(path.replace("_orig_mod.", ""), module, name)
            for prefix, module in model.named_modules()
            for name, _ in module.named_buffers(recurse=False)
            if (path := f"{prefix}.{name}" if prefix else name) in kept
        ]

    def described(self) -> Iterator[tuple[str, Kind, tuple[int, ...]]]:
        """Yield the name, the type in which moves are added up, and the shape of each buffer."""
        for buffer in self._buffers:
            yield buffer.path, buffer.kind, tuple(_numbers(buffer.sealed).shape)

    def seal(self) -> None:
        """What is in the buffers now is the value after the last step."""
        for buffer in self._buffers:
            buffer.seal()

    def seal_changes(self) -> None:
        """As `seal`, of buffers that were changed since the last step was applied."""
        for buffer in self._buffers:
            if buffer.is_changed:
                buffer.seal()

    def restore(self) -> None:
        """Undo what the program has done to the buffers since the last step, as by an evaluation in training mode."""
        for buffer in self._buffers:
            if buffer.is_changed:
                buffer.write()
        self._look()

    def take_moves(self, add: Callable[[int, Any], None], weight: float) -> None:
        """Pass the moves of one micro-batch, times `weight`, to `add(place, values)`, and undo them."""
        for place, buffer in enumerate(self._buffers, 1):
            if buffer.is_changed or buffer.may_change_unseen:
                if weight:
                    add(place, buffer.move() * weight)
                buffer.write()
        self._look()

    def apply(self, moves: list[Any]) -> None:
        """Move the buffers from their sealed values by the mean moves of a step, and seal them."""
        for buffer, move in zip(self._buffers, moves, strict=True):
            if move.any():  # not so for a table of positions
                buffer.apply(move)
        self._look()

    def _look(self) -> None:
        for buffer in self._buffers:
            buffer.look()


class _Buffer:
    """One buffer, and its value after the last step."""

    def __init__(self, path: str, module: Any, name: str) -> None:
        self.path = path
        self._module = module
        self._name = name
        norms = torch.nn.modules.batchnorm
        self.may_change_unseen = isinstance(module, norms._NormBase)
        """Kernels of BatchNorm write without counting up the version."""
        self._counter = "num_batches_tracked" if isinstance(module, norms._BatchNorm) else name
        """The buffer whose version tells that this one has changed."""
        self.seal()

    @property
    def kind(self) -> Kind:
        """The type in which moves are added up. Whole numbers are counters, which move by little."""
        return "float64" if self.sealed.dtype in (torch.float64, torch.complex128) else "float32"

    @property
    def _marks(self) -> tuple[int, int]:
        buffers = self._module._buffers
        counter = buffers.get(self._counter)
        return buffers[self._name]._version, 0 if counter is None else counter._version

    @property
    def is_changed(self) -> bool:
        """Whether somebody has written into the buffer, or put another tensor into its place."""
        return self._module._buffers[self._name] is not self._tensor or self._marks != self._seen

    def seal(self) -> None:
        """What is in the buffer now is the value after the last step."""
        self._tensor = self._module._buffers[self._name]
        self.sealed = self._tensor.detach().clone()
        self.look()

    def look(self) -> None:
        """What changes from now on has changed since the last step."""
        self._seen = self._marks

    def write(self) -> None:
        """Write the sealed value into the buffer."""
        self._module._buffers[self._name] = self._tensor
        with torch.no_grad():
            self._tensor.copy_(self.sealed)

    def move(self) -> Any:
        """Return how far the buffer has moved."""
        buffer, kind = self._module._buffers[self._name], getattr(torch, self.kind)
        if buffer is None or buffer.shape != self.sealed.shape:
            why = "this buffer has changed its shape while the model computed; pass persistent=False to register_buffer"
            raise InvalidArgumentError("model", self.path, why)
        return _numbers(buffer.detach()).to(kind) - _numbers(self.sealed).to(kind)

    def apply(self, move: Any) -> None:
        """Move from the sealed value, and seal that."""
        numbers = _numbers(self.sealed)
        move = move.to(numbers.device)
        if numbers.dtype is torch.bool:  # what one micro-batch has switched on or off is so
            moved = (numbers | (move > 0)) & (move >= 0)
        elif numbers.dtype.is_floating_point:
            moved = numbers.to(move.dtype) + move
        else:
            moved = numbers + move.round().to(numbers.dtype)
        numbers.copy_(moved)
        self.write()


def _numbers(tensor: Any) -> Any:
    """Return a tensor of complex numbers as one of their parts, and others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
