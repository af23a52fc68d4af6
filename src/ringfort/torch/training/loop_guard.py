"""`LoopGuard`: notices what a program's loop has changed that only the run may change.

A machine without a part in a step does not run the loop, and one that joins replays steps without it. So a learning
rate or a weight that a loop sets is set on some machines alone, and they would drift apart unnoticed for many steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch

_IN_ON_STEP: Final = (
    "the loop has changed it, on this machine alone; change it in on_step=, which runs in every step on every machine"
)
_BY_THE_RUN: Final = (
    "the loop has stepped it, and the run does that after each step; take scheduler.step() out of the loop"
)
_PASS_IT: Final = (
    "the loop has changed it, on this machine alone; pass the scheduler to elastic(scheduler=), which steps it on "
    "every machine, or change it in on_step="
)


class LoopGuard:
    """What schedulers, parameter groups and parameters were like after the last step. No pass over weights: torch
    counts how often each tensor was written."""

    def __init__(self, names: Mapping[Any, str], optimizer: Any, schedulers: Sequence[Any]) -> None:
        self._names = names
        self._optimizer = optimizer
        self._schedulers = schedulers
        self._settings: dict[str, Any] | None = None
        self._written: list[tuple[int, bool]] = []

    def remember(self) -> None:
        """What is changed from now on, the loop has changed."""
        self._settings, self._written = dict(self._current_settings()), self._current_writes()

    def begin(self) -> None:
        """The loop begins, if it has not: until then the program may change what it likes."""
        if self._settings is None:
            self.remember()

    def check(self) -> None:
        """Raise `InvalidArgumentError` if the loop has changed something since `remember`."""
        if self._settings is None:
            return
        found = dict(self._current_settings())
        for what, before in self._settings.items():
            if what not in found or not _is_same(before, found[what]):
                has_other = what.endswith("['lr']") and not self._schedulers
                why = _BY_THE_RUN if what.startswith("scheduler") else _PASS_IT if has_other else _IN_ON_STEP
                raise InvalidArgumentError(what, "changed", why)
        written = self._current_writes()
        if written != self._written:
            pairs = zip(self._names.values(), self._written, written, strict=True)
            name = next(name for name, before, now in pairs if before != now)
            raise InvalidArgumentError(f"model[{name!r}]", "changed", _IN_ON_STEP)

    def _current_settings(self) -> Iterator[tuple[str, Any]]:
        for place, scheduler in enumerate(self._schedulers):
            yield f"scheduler[{place}]", getattr(scheduler, "last_epoch", None)
        groups = self._optimizer.param_groups
        yield "optimizer.param_groups", len(groups)
        for place, group in enumerate(groups):
            for key, value in group.items():
                if key != "param_names":
                    yield f"optimizer.param_groups[{place}][{key!r}]", len(value) if key == "params" else _mark(value)

    def _current_writes(self) -> list[tuple[int, bool]]:
        """Return how often each parameter was written, and whether it is trained."""
        return [(parameter._version, parameter.requires_grad) for parameter in self._names]


def _mark(value: Any) -> Any:
    return _Written(value, value._version) if isinstance(value, torch.Tensor) else value


class _Written(NamedTuple):
    """A tensor, such as a learning rate on a GPU, and how often it was written."""

    tensor: Any
    version: int


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, _Written):
        return isinstance(now, _Written) and now.tensor is before.tensor and now.version == before.version
    return bool(before == now)
