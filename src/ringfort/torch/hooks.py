"""What Ringfort hooks into torch: it counts the steps of optimizers, and keeps the compiler and the flight recorder
away from classes of ours."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any, Final, TypeVar

from ringfort.telemetry.steps import own_steps
from ringfort.torch.names import dist, torch

_T = TypeVar("_T", bound=type)

_frames: Final[Any] = torch._C._dynamo.eval_frame
_ACTION: Final[Any] = getattr(_frames, "_FrameAction", None)
_RECORDER: Final = "_maybe_attach_flight_recorder"
"""The function of torch 2.15 that attaches its flight recorder to a new group."""


@cache
def count_steps() -> None:
    """Register a hook that counts the steps of every optimizer of this process, which `ringfort peers` shows.
    Idempotent."""
    import_module("torch.optim.optimizer").register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Any, *_: Any) -> None:
    # Steps inside torch.compile are not counted: the compiler would trace the counter.
    if not torch.compiler.is_compiling():
        own_steps().mark(optimizer)


def untraced(cls: _T) -> _T:
    """Tell the compiler to leave the methods of a class alone.

    Torch's C++ calls our methods while a compiled model runs. The compiler would try to trace them, and fail at members
    of a process group that it does not know. Unlike `torch.compiler.disable`, this costs nothing at the call and does
    not import the compiler.
    """
    if _ACTION is not None:
        skip = _frames._FrameExecStrategy(_ACTION.SKIP, _ACTION.SKIP)  # this frame, and all that it calls
        for member in vars(cls).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                _frames.set_code_exec_strategy(function.__code__, skip)
    return cls


def keep_recorder_off(groups: type) -> None:
    """Keep torch's flight recorder away from groups of this class: it can only record groups of torch's own engines,
    and raises for others. Idempotent."""
    attach: Any = getattr(dist.distributed_c10d, _RECORDER, None)
    if attach is None or getattr(attach, "spares_ringfort", False):
        return

    def attach_to_others(group: Any, *arguments: Any, **settings: Any) -> Any:
        return None if isinstance(group, groups) else attach(group, *arguments, **settings)

    attach_to_others.spares_ringfort = True  # pyright: ignore[reportFunctionMemberAccess]
    setattr(dist.distributed_c10d, _RECORDER, attach_to_others)
