"""`python -m ringfort.launch.torch_program [-m] SCRIPT ARGUMENTS`: a rank of `ringfort run --torch-backend ringfort`.

Makes torch's default group, then runs the program as `python` would.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ringfort.errors import DistributedError
from ringfort.telemetry.log_handler import show_lines


def run_program(command: Sequence[str]) -> None:
    """Run a script, or with `-m` in front a module."""
    try:
        from ringfort.torch.default_group import make_default_group  # imports torch

        show_lines("ringfort.torch")
        make_default_group()
    except DistributedError as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path[0] = str(Path(command[0]).resolve().parent)
            runpy.run_path(command[0], run_name="__main__")
    except Exception as exc:
        exc.with_traceback(_of_program(exc.__traceback__))
        sys.excepthook(type(exc), exc, exc.__traceback__)
        sys.exit(1)


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without what runs the program: as it would be under plain `python`."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    run_program(sys.argv[1:])
