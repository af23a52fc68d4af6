"""How much memory of the host this process can still take: containers have less than the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

import psutil

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


def available_memory(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """Return the bytes that are left: those of the machine, or of the tightest limit of a control group."""
    left = [psutil.virtual_memory().available]
    with suppress(OSError):  # not on macOS
        left += [_left_in(folder) for folder in _folders(groups, own.read_text())]
    return max(0, min(left))


def _folders(groups: Path, own: str) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, each with those around it."""
    for line in own.splitlines():
        number, kinds, name = line.split(":", 2)
        if number != "0" and "memory" not in kinds.split(","):
            continue
        root = groups if number == "0" else groups / "memory"
        path = PurePosixPath(name.lstrip("/"))
        # A container sees its own group as the root, and may still be told the path that it has outside.
        yield from {root / one for one in (path, *path.parents)}


def _left_in(folder: Path) -> int:
    """Return what a control group may still take, of its first or second version; a large number without a limit.
    Cached files make room."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            most, now = (int((folder / name).read_text()) for name in (limit, used))
            rows = dict(row.split(" ", 1) for row in (folder / "memory.stat").read_text().splitlines())
            return most - now + int(rows.get(cached, 0))
    return 1 << 62
