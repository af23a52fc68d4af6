"""`ModelBuffers`: buffers that a model changes while it computes, such as the statistics of BatchNorm.

Every micro-batch starts from the values of the last sealed step, whoever computes it. How far it has moved them is
added up like a gradient, and all members apply the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch

Kind = Literal["float32", "float64"]
_SMALL: Final = 1 << 16
"""Elements up to which a buffer is taken to change in every micro-batch: kernels such as that of `F.batch_norm`, and
writes through `.data`, do not count up its version. A larger one changes if its version does: to look at all values of
a table of positions would take too long."""


class ModelBuffers:
    """The buffers of a model that are part of its state. Those that are not are the program's own."""

    def __init__(self, model: Any) -> None:
        kept = set(model.state_dict())
        found = dict[int, _Buffer]()
        for prefix, module in model.named_modules():
            for name, tensor in module.named_buffers(recurse=False):
                path = f"{prefix}.{name}" if prefix else name
                if id(tensor) in found:  # two modules share it, and it moves once
                    found[id(tensor)].places.append((module, name))
                elif path in kept:
                    found[id(tensor)] = _Buffer(path.replace("_orig_mod.", ""), module, name)
        self._buffers = list(found.values())

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
            elif buffer.may_change_unseen:
                buffer.sealed.copy_(buffer.tensor)

    def restore(self) -> None:
        """Undo what the program has done to the buffers since the last step, as by an evaluation in training mode."""
        for buffer in self._buffers:
            if buffer.is_changed or (buffer.may_change_unseen and not buffer.is_counted):
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
            if buffer.may_change_unseen or move.any():  # not so for a table of positions
                buffer.apply(move)
        self._look()

    def _look(self) -> None:
        for buffer in self._buffers:
            buffer.look()


class _Buffer:
    """One buffer, and its value after the last step."""

    def __init__(self, path: str, module: Any, name: str) -> None:
        self.path = path
        self.places: list[tuple[Any, str]] = [(module, name)]
        """The modules that have it, and its names there."""
        is_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        self._counter = "num_batches_tracked" if is_norm else name
        """The buffer whose version tells that this one has changed."""
        self.is_counted = is_norm and module._buffers.get(self._counter) is not None
        """Whether that one's version is always counted up."""
        self.tensor = module._buffers[name]
        self.seal()

    @property
    def kind(self) -> Kind:
        """The type in which moves are added up. Whole numbers are counters, which move by little."""
        return "float64" if self.sealed.dtype in (torch.float64, torch.complex128) else "float32"

    @property
    def _current(self) -> Any:
        """What is in the place of the buffer now: perhaps another tensor, or None."""
        for module, name in self.places:
            if module._buffers[name] is not self.tensor:
                return module._buffers[name]
        return self.tensor

    @property
    def _marks(self) -> tuple[int, int]:
        counter = self.places[0][0]._buffers.get(self._counter)
        return self.tensor._version, 0 if counter is None else counter._version

    @property
    def is_changed(self) -> bool:
        """Whether somebody has written into the buffer, or put another tensor into its place."""
        return self._current is not self.tensor or self._marks != self._seen

    @property
    def may_change_unseen(self) -> bool:
        """Whether it is taken to have changed even if it does not look so. Not with infinities, as in a mask: those do
        not move."""
        return self.sealed.numel() <= _SMALL and not self._has_infinities

    @property
    def _has_infinities(self) -> bool:
        if self._infinite is None:  # asked once for each value that is sealed: that of a GPU must be waited for
            self._infinite = not bool(torch.isfinite(self.sealed).all())
        return self._infinite

    def seal(self) -> None:
        """What is in the buffer now is the value after the last step."""
        self.tensor = self._current
        for module, name in self.places:
            module._buffers[name] = self.tensor
        self.sealed = self.tensor.detach().clone()
        self._infinite: bool | None = None
        self.look()

    def look(self) -> None:
        """What changes from now on has changed since the last step."""
        self._seen = self._marks

    def write(self) -> None:
        """Write the sealed value into the buffer."""
        for module, name in self.places:
            module._buffers[name] = self.tensor
        with torch.no_grad():
            self.tensor.copy_(self.sealed)

    def move(self) -> Any:
        """Return how far the buffer has moved. Raise `InvalidArgumentError` for moves that have no mean."""
        buffer, kind = self._current, getattr(torch, self.kind)
        if buffer is None or buffer.shape != self.sealed.shape:
            why = "this buffer has changed its shape while the model computed; pass persistent=False to register_buffer"
            raise InvalidArgumentError("model", self.path, why)
        now, sealed = _numbers(buffer.detach()), _numbers(self.sealed)
        if not sealed.dtype.is_floating_point:  # before they become floats, which have no large whole numbers
            return (now.long() - sealed.long()).to(kind)
        now, sealed = now.to(kind), sealed.to(kind)
        if not self._has_infinities:
            return now - sealed
        is_same = (now == sealed) | (now.isnan() & sealed.isnan())
        if not bool((is_same | sealed.isfinite()).all()):
            why = (
                "the model has changed an infinite value of this buffer, so the machines have no mean to agree on; let "
                "the model compute a batch before ringfort.torch.elastic(), or pass persistent=False to register_buffer"
            )
            raise InvalidArgumentError("model", self.path, why)
        return torch.where(is_same, torch.zeros_like(sealed), now - sealed)

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
