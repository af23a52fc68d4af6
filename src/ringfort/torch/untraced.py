"""`untraced`: classes whose methods `torch.compile` does not trace."""

from __future__ import annotations

from types import FunctionType
from typing import Any, Final, TypeVar

from ringfort.torch.names import torch

_T = TypeVar("_T", bound=type)

_frames: Final[Any] = torch._C._dynamo.eval_frame
_ACTION: Final[Any] = getattr(_frames, "_FrameAction", None)


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
