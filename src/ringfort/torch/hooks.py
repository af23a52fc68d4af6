"""What Ringfort hooks into torch: it counts the steps of optimizers and the time that programs wait for a DataLoader,
and keeps the compiler and the flight recorder away from classes of ours."""

from __future__ import annotations

from functools import cache, wraps
from importlib import import_module
from types import FunctionType
from typing import Any, Final, TypeVar

from ringfort.telemetry.trace import Trace, own_trace
from ringfort.torch.future_waits import future_waits
from ringfort.torch.names import dist, torch

_T = TypeVar("_T", bound=type)

_frames: Final[Any] = torch._C._dynamo.eval_frame
_ACTION: Final[Any] = getattr(_frames, "_FrameAction", None)
_RECORDER: Final = "_maybe_attach_flight_recorder"
"""The function of torch 2.15 that attaches its flight recorder to a new group."""


def watch_training() -> None:
    """Count the steps of every optimizer of this process, and the waits for data and futures. Idempotent."""
    _hook_into_torch()
    _follow_futures(own_trace())


@cache
def _hook_into_torch() -> None:
    import_module("torch.optim.optimizer").register_optimizer_step_post_hook(_stepped)
    _time_loaders()


@cache
def _follow_futures(trace: Trace) -> None:  # a forked process has a trace of its own
    trace.exchange_from(future_waits.exchanged)


def _stepped(optimizer: Any, *_: Any) -> None:
    # Steps inside torch.compile are not counted: the compiler would trace the counter.
    if not torch.compiler.is_compiling():
        own_trace().mark(optimizer)


def _time_loaders() -> None:
    """Time every `next` of a DataLoader's iterator. The class is not public: without it, that time is not known."""
    loader = import_module("torch.utils.data.dataloader")
    base: Any = getattr(loader, "_BaseDataLoaderIter", None)
    plain: Any = getattr(base, "__next__", None)
    if plain is None:
        return

    @wraps(plain)
    def timed(self: Any) -> Any:
        with own_trace().loading():
            return plain(self)

    base.__next__ = timed


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
