"""`Update`: applies a sealed step to the model: gradients, clipping, optimizer, scheduler, scaler, and the program's
own `on_step`. Every member does exactly this for every step, for replayed ones too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from typing import Any, Final, cast
from weakref import WeakKeyDictionary, ref

import numpy as np

from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch
from ringfort.torch.training.loop_guard import LoopGuard
from ringfort.torch.training.model_buffers import ModelBuffers
from ringfort.torch.training.tensor_sum import TensorSum
from ringfort.training.elastic.protocol import Result
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.step import Done

_owners: Final[WeakKeyDictionary[Any, ref[Update]]] = WeakKeyDictionary()
"""Whose run an optimizer is in."""
OnStep = Callable[[dict[str, Any], int], object]
_ROW: Final = 4096
"""Squares that are added up in their own type before they are added in float64."""
_PIECE: Final = 256 * _ROW
"""Elements that a thread takes at a time."""
_LEAST: Final = 1e-6
"""Added to a norm before it divides, as torch's `clip_grad_norm_` does."""


class Update:
    """What follows from the mean gradients of a step."""

    def __init__(
        self,
        sums: TensorSum,
        buffers: ModelBuffers,
        names: dict[Any, str],
        optimizer: Any,
        *,
        schedulers: Sequence[Any],
        scheduler_per: str,
        scaler: Any,
        clip_norm: float | None,
        on_step: OnStep | None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`state` is the program's own."""
        self._sums = sums
        self._buffers = buffers
        self._names = names
        self._optimizer = optimizer
        self._schedulers = schedulers
        self._per = scheduler_per
        self._scaler = scaler
        self._clip_norm = clip_norm
        self._on_step = on_step
        self._state = state or {}
        self.guard = LoopGuard(names, optimizer, schedulers)
        """Notices what the loop changes."""
        self._is_applying = False
        self._is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        self.lend: Callable[[Result], None] = lambda _: None
        """Called with a result whose memory the optimizer gets."""
        self._guard = optimizer.register_step_pre_hook(self._check)
        before = _owners.get(optimizer)
        other = None if before is None else before()
        if other is not None:  # of a run that was never closed, as when a cell of a notebook runs again
            other.close()
        _owners[optimizer] = ref(self)

    @property
    def scales(self) -> bool:
        """Whether a scaler is at work."""
        return self._scaler is not None and self._scaler.is_enabled()

    def scaled(self, loss: Any) -> Any:
        """Return a loss times the scale of the scaler."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def apply(self, done: Done, *, ends_pass: bool) -> None:
        """Apply a sealed step. One without a mean changes nothing but the scale, and what the program does in `on_step`
        or once per pass."""
        if done.is_overtaken:
            return  # nothing to apply
        self.guard.check()
        is_applied = done.is_finite and not done.is_empty
        self._is_applying = True
        try:
            gradients = self._step(done) if is_applied else {}
            if self._on_step is not None:
                self._on_step(gradients, done.result.step)
                self._check_state()
                self._buffers.seal_changes()
        finally:
            self._is_applying = False
            self._sums.drop_gradients()
        if is_applied if self._per == "step" else ends_pass:
            self._follow_schedule()
        self._rescale(is_finite=done.is_finite)
        self._sums.refresh()
        self.guard.remember()

    def _check_state(self) -> None:
        """Raise `InvalidArgumentError` if `on_step` has kept a gradient in the program's state: the next micro-batch
        overwrites it."""
        if self._state:
            staging = self._sums.staging
            flats = (*staging.flats.values(), *staging.results.values())
            staged = {flat.untyped_storage().data_ptr() for flat in flats}
            for where, tensor in _tensors_of(self._state, "state"):
                if tensor.untyped_storage().data_ptr() in staged:
                    why = "is a gradient, whose memory the run uses again; keep gradient.clone()"
                    raise InvalidArgumentError(where, "kept by on_step", why)

    def _step(self, done: Done) -> dict[str, Any]:
        """Run the optimizer. Return the gradients by the names of their parameters."""
        payload, factor = done.result.payload, 1 / done.weight
        if self.scales:
            factor /= self._scaler.get_scale()
        if self._clip_norm is not None and self._sums.staging.is_host:  # so all is written once
            norm = sqrt(sum(squared_norm(array) for array in self._sums.gradients_of(payload))) * factor
            factor *= min(1.0, self._clip_norm / (norm + _LEAST))
        if factor == done.weight == 1 and self._sums.staging.is_host and self._keeps_gradients:
            self.lend(done.result)
            gradients, moves = self._sums.lend(payload)
        else:
            gradients, moves = self._sums.load(payload, factor, 1 / done.weight)
        if self._clip_norm is not None and not self._sums.staging.is_host:
            self._clip(gradients, self._clip_norm)
        self._buffers.apply(moves)
        for parameter, gradient in zip(self._sums.parameters, gradients, strict=True):
            parameter.grad = gradient
        named = {self._names[one]: one.grad for one in self._sums.parameters if one.grad is not None}
        self._optimizer.step()
        return named

    @property
    def _keeps_gradients(self) -> bool:
        """Whether nobody changes gradients in place. Torch's own optimizers do not, except with `foreach` (Nesterov's
        momentum); of others, of `on_step`, and of what the program has registered to run before the optimizer, such as
        clipping by value, nobody knows."""
        has_foreach = any(group.get("foreach") for group in self._optimizer.param_groups)
        has_hooks = len(self._optimizer._optimizer_step_pre_hooks) > 1  # one is ours
        return self._is_torchs and not has_foreach and not has_hooks and self._on_step is None

    @staticmethod
    def _clip(gradients: Sequence[Any], most: float) -> None:
        """Clip on the device, without waiting for it."""
        found = [gradient for gradient in gradients if gradient is not None]
        if not found:
            return
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one.float()) for one in found]))
        torch._foreach_mul_(found, (most / (norm + _LEAST)).clamp(max=1.0))

    def _follow_schedule(self) -> None:
        for scheduler in self._schedulers:
            scheduler.step()

    def _rescale(self, *, is_finite: bool) -> None:
        """Do what `GradScaler.update` does. Members have no gradients of their own to look at: the seal has said
        whether those of the step are finite."""
        if not self.scales:
            return
        state = self._scaler.state_dict()
        if not is_finite:
            state["scale"], state["_growth_tracker"] = state["scale"] * state["backoff_factor"], 0
        elif state["_growth_tracker"] + 1 >= state["growth_interval"]:
            state["scale"], state["_growth_tracker"] = state["scale"] * state["growth_factor"], 0
        else:
            state["_growth_tracker"] += 1
        self._scaler.load_state_dict(state)

    def _check(self, optimizer: Any, *_: Any) -> None:
        if not self._is_applying:
            why = "was called by the program; call run.step() instead, which calls it when the step is sealed"
            raise InvalidArgumentError("optimizer.step", type(optimizer).__name__, why)

    def close(self) -> None:
        """Give optimizer and model back to the program. Idempotent."""
        self._guard.remove()
        self._sums.close()


def _tensors_of(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in dicts and lists, and what they are called. Modules have their own."""
    if type(value) is torch.Tensor and value.layout is torch.strided:
        yield where, value
    elif isinstance(value, dict):
        for key, child in cast("dict[Any, Any]", value).items():
            yield from _tensors_of(child, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for place, child in enumerate(cast("list[Any]", value)):
            yield from _tensors_of(child, f"{where}[{place}]")


def squared_norm(array: Array) -> float:
    """Return the sum of squares. (Neither BLAS nor torch: they add in another order with another number of threads, and
    machines of one kind must have the same bits.)"""
    whole = array.size // _ROW * _ROW
    pieces = [array[begin : min(begin + _PIECE, whole)] for begin in range(0, whole, _PIECE)]
    if len(pieces) <= 1:
        sums = [_squares(piece) for piece in pieces]
    else:
        with ThreadPoolExecutor(torch.get_num_threads(), "ringfort-norm") as threads:
            sums = list(threads.map(_squares, pieces))
    rest = array[whole:]
    with np.errstate(over="ignore"):
        total = float(np.add.reduce(np.concatenate(sums), dtype=np.float64)) if sums else 0.0
        return total + float(np.einsum("i,i->", rest, rest))


def _squares(piece: Array) -> Array:
    """Return the sum of squares of each row, in the type of the array."""
    rows = piece.reshape(-1, _ROW)
    with np.errstate(over="ignore"):  # of this thread
        return np.einsum("ij,ij->i", rows, rows)
