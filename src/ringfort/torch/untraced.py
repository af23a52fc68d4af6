"""`untraced`: classes whose methods `torch.compile` does not look into."""

from __future__ import annotations

from types import FunctionType
from typing import Any, Final, TypeVar

from ringfort.torch.names import torch

_T = TypeVar("_T", bound=type)

_frames: Final[Any] = torch._C._dynamo.eval_frame
_ACTION: Final[Any] = getattr(_frames, "_FrameAction", None)


def untraced(cls: _T) -> _T:
    """Torch's C++ calls our methods while a compiled model runs, as any Python: the compiler would try to trace them,
    and it fails at members of a process group that it does not know. To say so here costs nothing at the call, and does
    not import the compiler, as `torch.compiler.disable` would."""
    if _ACTION is not None:
        skip = _frames._FrameExecStrategy(_ACTION.SKIP, _ACTION.SKIP)  # this frame, and all that it calls
        for member in vars(cls).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                _frames.set_code_exec_strategy(function.__code__, skip)
    return cls
