"""`make_ours`: every process group of this process is Ringfort's, whichever backend the program names.

For programs that `ringfort run --torch-backend ringfort` has started, and for the processes that they start with
`multiprocessing`: those import this by autoload.py, so it imports nothing that torch has not.
"""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from typing import Any, Final

from ringfort.torch import BACKEND

OPTION: Final = "ringfort-torch-backend"
"""The option of the interpreter (`-X`) that says so to the processes of `multiprocessing`."""
_MAKER: Final = "_new_process_group_helper"
"""What torch calls for every group that it makes."""


def make_ours() -> None:
    """Make every group from now on with our backend. Idempotent."""
    c10d: Any = import_module("torch.distributed.distributed_c10d")
    original = getattr(c10d, _MAKER)
    if getattr(original, "is_ringforts", False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make_group(*given: Any, **keywords: Any) -> Any:
        asked = signature.bind(*given, **keywords)
        asked.arguments["backend"] = c10d.Backend(BACKEND)
        return original(*asked.args, **asked.kwargs)

    setattr(make_group, "is_ringforts", True)  # noqa: B010  # functions have no such attribute
    setattr(c10d, _MAKER, make_group)


def tell_children() -> None:
    """Let the processes that `multiprocessing` starts do the same. A forked one does anyway."""
    util: Any = import_module("multiprocessing.util")
    original = util._args_from_interpreter_flags

    @functools.wraps(original)
    def flags() -> list[str]:
        return [*original(), "-X", OPTION]

    util._args_from_interpreter_flags = flags
