"""Reads the last output of a rank, which its launcher keeps in two bounded files in turn: `rank-3.log` and, older,
`rank-3.log.1`. Links with the id of the process, `4711.log` and `4711.log.1`, lead to them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ringfort.telemetry.watching import MAX_PART, LogPart, LogRequest

_NUMBERS: Final = (1 << 62) - 1
"""Some file systems number their files with 64 bits."""


class _File(NamedTuple):
    path: Path
    number: int
    size: int

    @classmethod
    def of(cls, path: Path, found: os.stat_result) -> _File:
        return cls(path, found.st_ino & _NUMBERS, found.st_size)


def log_file(folder: Path, rank: int) -> Path:
    """Return where a launcher writes the output of a rank."""
    return folder / f"rank-{rank}.log"


def older_log_file(folder: Path, rank: int) -> Path:
    """Return where the output before that in `log_file` is."""
    return folder / f"rank-{rank}.log.1"


def next_part(trace: Path, asked: LogRequest) -> LogPart | None:
    """Return what a viewer lacks of the output of the process with this trace: what follows the part that it has; if
    that is all, what comes before it. None if it has everything, or if there are no such files."""
    newer, older = (_look(path) for path in _files_of(trace, asked.rank))
    files = [file for file in (older, newer) if file is not None]
    known = next((file for file in files if file.number == asked.file and asked.end <= file.size), None)
    if known is None:  # it has nothing, or something that is gone
        newest = next((file for file in reversed(files) if file.size), None)
        return None if newest is None else _read(asked.rank, newest, max(0, newest.size - MAX_PART), newest.size)
    if asked.end < known.size:
        # The newest part, if the rank writes more than can be sent.
        return _read(asked.rank, known, max(asked.end, known.size - MAX_PART), known.size)
    if known is older and newer is not None and newer.size:
        return _read(asked.rank, newer, max(0, newer.size - MAX_PART), newer.size)
    if asked.start:
        return _read(asked.rank, known, max(0, asked.start - MAX_PART), asked.start)
    return None


def _files_of(trace: Path, rank: int) -> tuple[Path, Path]:
    """The newer and the older file. By process, if its launcher has such links, because a member of an elastic run has
    another rank there than in its launcher."""
    newer = trace.with_suffix(".log")
    if newer.is_symlink():
        return newer, trace.with_suffix(".log.1")
    return log_file(trace.parent, rank), older_log_file(trace.parent, rank)


def _look(path: Path) -> _File | None:
    with suppress(OSError):
        return _File.of(path, path.stat())
    return None


def _read(rank: int, file: _File, start: int, end: int) -> LogPart | None:
    with suppress(OSError):
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if (
                _File.of(file.path, os.fstat(descriptor)).number == file.number
            ):  # else the files changed places meanwhile
                return LogPart(rank, file.number, start, os.pread(descriptor, end - start, start))
        finally:
            os.close(descriptor)
    return None
