"""`RunOptimizer`: a stand-in for the optimizer of a run, for loops that stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringfort.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ringfort.torch.training.run import TorchRun


class RunOptimizer:
    """Looks like the optimizer. `step` ends the micro-batch, and `zero_grad` does nothing: both belong to the run."""

    def __init__(self, optimizer: Any, run: TorchRun) -> None:
        self._optimizer = optimizer
        self._run = run

    def step(self, closure: Any = None) -> Any:
        """End the current micro-batch, after `closure` has computed its gradients. Return what that returned."""
        found = None if closure is None else closure()
        self._run.step()
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the run keeps the gradients until the step is sealed."""

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """That of the optimizer, for code that asks with `isinstance`."""
        found: Any = type(self._optimizer)  # pyright: ignore[reportUnknownVariableType]
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":  # which schedulers replace
            why = (
                "make the scheduler for the optimizer itself, before the run, and pass it as scheduler= to elastic() "
                "or to prepare(): the run steps it, on every machine"
            )
            raise InvalidArgumentError("optimizer", "run.optimizer", why)
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"RunOptimizer({self._optimizer!r})"
