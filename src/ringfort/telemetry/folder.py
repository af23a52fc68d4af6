"""Where traces are: a folder of this user's on this machine, with one folder for each program or launcher in it.

BASE/PID-RANDOM/PID.trace       the trace of one process (trace_file.py)
BASE/PID-RANDOM/rank-3.log      the last output of a rank, written by its launcher
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from ringfort.config import runtime_folder
from ringfort.telemetry.trace_file import SUFFIX

OLD: Final = 600.0
"""Seconds after which the traces of a process that has ended are removed."""


def base_folder() -> Path:
    """Return the folder of all traces of this user, and create it. Raises `OSError`, also if it is not this user's own:
    in a folder that everybody may write to, somebody else may have created it first."""
    base = runtime_folder()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{base} must be a folder that only this user can read; remove it")
    return base


def new_folder() -> Path:
    """Create the folder of a program or launcher, and remove what others have left behind. Raises `OSError`."""
    base = base_folder()
    remove_old(base)
    folder = base / f"{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    return folder


def traces(folder: Path) -> list[Path]:
    """Return the traces in a program's folder."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def programs(base: Path) -> list[Path]:
    """Return the folders of all programs and launchers of this user."""
    with suppress(OSError):
        return sorted(path for path in base.iterdir() if path.is_dir())
    return []


def remove_old(base: Path) -> None:
    """Remove the folders of programs that have ended a while ago."""
    for folder in programs(base):
        pid, _, _ = folder.name.partition("-")
        if not pid.isdigit() or _is_running(int(pid)):
            continue
        with suppress(OSError):
            newest = max((path.stat().st_mtime for path in (folder, *folder.iterdir())), default=0.0)
            if time.time() - newest > OLD:
                shutil.rmtree(folder)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
