"""The output of ranks in files: all of it in the folder that `--log-dir` names, and the latest of it for viewers.

Both streams of a rank go to one file, as bytes, in the order in which the launcher read them.

    DIR/rank-3.log                           a run on one machine
    DIR/rank-3.study.log                     several machines, which may share the folder: this one is `study`
    DIR/rank-3.study.run-2.restart-1.log     the second run in this folder, after the first restart
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ringfort.errors import InvalidArgumentError
from ringfort.telemetry.rank_logs import log_file, older_log_file

RECENT_BYTES: Final = 1 << 16
"""Of each of the two files with the latest output of a rank, which are written in turn. They are in memory."""
_MAX_HOST: Final = 64
"""Characters of a machine's name in the name of a file."""


class OutputFiles:
    """The files of one launcher. No error leaves it once it is made: output that cannot be kept is still printed."""

    def __init__(
        self,
        folder: Path | None = None,
        recent: Path | None = None,
        *,
        host: str = "",
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Keep all output in `folder`, with `host` in the names of its files, and the latest output in `recent`.

        Raises `InvalidArgumentError` if nothing can be written to `folder`, which is created if it does not exist.
        """
        self._folder, self._recent_folder, self._warn = folder, recent, warn
        self._host = host and "." + re.sub(r"[^\w.-]", "_", host)[:_MAX_HOST]
        self._run = 1 if folder is None else _next_run(_writable(folder), self._host)
        self._files: dict[int, int] = {}
        self._missing: dict[int, int] = {}
        """Bytes of each rank that could not be written, and that its file does not mention yet."""
        self._recent: dict[int, RecentOutput] = {}
        self._has_warned = False

    def begin(self, rank: int, restarts: int = 0) -> None:
        """Create the file of a rank that is about to start."""
        self._close_file(rank)
        if self._recent_folder is not None and rank not in self._recent:
            self._recent[rank] = RecentOutput(self._recent_folder, rank)
        if self._folder is None:
            return
        while True:
            path = self._folder / self._name(rank, restarts)
            try:
                self._files[rank] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                self._run += 1  # another launcher has just begun to use the folder
            except OSError as exc:
                self._failed(rank, exc)
                return
            else:
                return

    def started(self, rank: int, pid: int) -> None:
        """Let viewers find the latest output of a rank by its process too: members of an elastic run have other ranks
        there than in their launcher."""
        if self._recent_folder is not None:
            with suppress(OSError):
                (self._recent_folder / f"{pid}.log").symlink_to(log_file(self._recent_folder, rank).name)
                (self._recent_folder / f"{pid}.log.1").symlink_to(older_log_file(self._recent_folder, rank).name)

    def _name(self, rank: int, restarts: int) -> str:
        run = f".run-{self._run}" if self._run > 1 else ""
        restart = f".restart-{restarts}" if restarts else ""
        return f"rank-{rank}{self._host}{run}{restart}.log"

    def write(self, rank: int, data: bytes) -> None:
        """Keep what a rank has written."""
        if (recent := self._recent.get(rank)) is not None:
            recent.write(data)
        file, rest = self._files.get(rank), data
        try:
            self._mention(rank)
            while file is not None and rest:
                rest = rest[os.write(file, rest) :]
        except OSError as exc:  # written again with the next output: somebody may make room
            self._missing[rank] = self._missing.get(rank, 0) + len(rest)
            self._failed(rank, exc)

    def _mention(self, rank: int) -> None:
        """Write into the file of a rank that output is missing, if some is. Raises `OSError`."""
        file, missing = self._files.get(rank), self._missing.get(rank, 0)
        if file is not None and missing:
            words = f"\n[ringfort: {missing} bytes of output are missing here, they could not be written]\n"
            # A part of it would not be understood: there is room for all of it, or for nothing.
            end = os.lseek(file, 0, os.SEEK_CUR)
            if os.write(file, words.encode()) < len(words):
                os.lseek(file, end, os.SEEK_SET)
                os.ftruncate(file, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            del self._missing[rank]

    def _failed(self, rank: int, exc: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"cannot keep the output of rank {rank} in {self._folder}: {exc.strerror}. The run continues, and its "
                "output is still printed"
            )

    def _close_file(self, rank: int) -> None:
        with suppress(OSError):
            self._mention(rank)
        self._missing.pop(rank, None)
        file = self._files.pop(rank, None)
        if file is not None:
            with suppress(OSError):  # network file systems report a full disk here
                os.close(file)

    def close(self) -> None:
        """Close all files. Idempotent."""
        for rank in list(self._files):
            self._close_file(rank)
        for recent in self._recent.values():
            recent.close()
        self._recent.clear()


class RecentOutput:
    """The latest output of a rank, in two files in turn."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._older = log_file(folder, rank), older_log_file(folder, rank)
        self._file = -1
        self._size = RECENT_BYTES
        """Of the newer file; the first write begins one."""

    def write(self, data: bytes) -> None:
        """Add output. Errors are ignored: it is for display only."""
        data = data[-RECENT_BYTES:]
        with suppress(OSError):
            if self._size + len(data) > RECENT_BYTES:
                self._begin()
            self._size += os.write(self._file, data)

    def _begin(self) -> None:
        self.close()
        with suppress(FileNotFoundError):
            self._path.replace(self._older)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._size = 0

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file, self._size = -1, RECENT_BYTES


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as exc:
        why = f"cannot be written: {exc.strerror or exc}; name a folder in which this user may create files"
        raise InvalidArgumentError("log_dir", str(folder), why) from exc


def _next_run(folder: Path, host: str) -> int:
    """The number of the run whose files are not there yet: no run writes over the files of another."""
    pattern = re.compile(rf"rank-\d+{re.escape(host)}(?:\.run-(\d{{1,9}}))?(?:\.restart-\d+)?\.log")
    found = (pattern.fullmatch(path.name) for path in folder.iterdir())
    return 1 + max((int(name[1] or 1) for name in found if name), default=0)
