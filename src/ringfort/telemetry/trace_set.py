"""`TraceSet`: the traces of several processes of this machine, and their reports.

A process that ends is reported for a while as one that has ended. If it was killed, its trace stays, and still tells
what it did last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

from ringfort.errors import ProtocolError
from ringfort.telemetry.records import Header
from ringfort.telemetry.report import MAX_REPORT_BYTES, Report, Reporter
from ringfort.telemetry.trace_file import TraceReader

MAX_TRACES: Final = 256
"""Traces that are read at the same time."""
ENDED: Final = 5.0
"""Seconds for which a process that has ended is reported: a note may be lost."""
MAX_ENDED: Final = 64
"""Processes that have ended whose output can still be found."""
RECENT: Final = 60.0
"""Seconds. Of a process that had ended earlier when it was first seen, nothing is reported."""

_File = tuple[Path, int]
"""A path, and the number of its file: a process id may be used again."""


class TraceSet:
    """All methods are thread-safe."""

    def __init__(
        self,
        find: Callable[[], Iterable[Path]],
        host: str = "",
        name: str = "",
        clock: Callable[[], float] = time.time,
        limit: int = MAX_REPORT_BYTES,
    ) -> None:
        """`find` returns the traces that there are now. Nothing is read before the first `reports`. Each of them has at
        most `limit` bytes."""
        self._find, self._clock, self._limit = find, clock, limit
        self.host, self.name = host, name
        self._lock = Lock()
        self._open: dict[_File, Reporter] = {}
        self._ended_at: dict[_File, float] = {}
        """When each was first seen to have ended."""
        self._done: set[_File] = set()
        """Traces of which everything was reported. Some are still there."""
        self._headers: dict[_File, Header] = {}
        """Of those that are reported, and the last ones that have ended: people want to read their output."""
        self._turn = 0

    def reports(self, vitals: Mapping[str, float] | None = None, limit: int = MAX_TRACES) -> list[Report]:
        """Return what happened since each process's report before. Of more than `limit` processes, some are reported
        by each call, in turn."""
        with self._lock:
            now = self._clock()
            self._look()
            files = list(self._open)
            start = self._turn % max(1, len(files))
            chosen = (files[start:] + files[:start])[:limit]
            self._turn = start + len(chosen)
            found: list[Report] = []
            for file in chosen:
                report = self._report(file, vitals, now)
                if report is not None:
                    found.append(report)
            return found

    def trace_of(self, rank: int, run: str | None = None, *, ended: bool = True) -> Path | None:
        """Return the trace of a rank, of those that were reported; the newest if there are several. `run` is as
        `Header.run_name`. With `ended`, also of a process that ended a while ago."""
        with self._lock:
            found = [
                (header.started, file[0])
                for file, header in self._headers.items()
                if header.rank == rank and run in (None, header.run_name) and (ended or file in self._open)
            ]
        return max(found)[1] if found else None

    def close(self) -> None:
        """Close all files. They are opened again when there is another call of `reports`."""
        with self._lock:
            for file in list(self._open):
                self._close(file)
            self._done.clear()
            self._headers.clear()

    def _look(self) -> None:
        """Open the traces that are new."""
        there: set[_File] = set()
        for path in self._find():
            with suppress(OSError):
                there.add((path, path.stat().st_ino))
        self._done &= there
        for file in sorted(there - self._open.keys() - self._done)[: max(0, MAX_TRACES - len(self._open))]:
            with suppress(OSError, ProtocolError):  # it is being made, or was removed at this moment
                self._open[file] = Reporter(TraceReader(file[0]), self.host, self.name, self._clock, self._limit)

    def _report(self, file: _File, vitals: Mapping[str, float] | None, now: float) -> Report | None:
        try:
            report = self._open[file].report(vitals)
        except ProtocolError:  # it has no header yet
            if not self._open[file].reader.is_alive():
                self._finish(file)
            return None
        is_new = file not in self._headers
        self._headers[file] = report.header
        if report.is_alive:
            self._ended_at.pop(file, None)
            return report
        if is_new and now - _latest(report) > RECENT:
            self._finish(file)
            return None
        if now - self._ended_at.setdefault(file, now) > ENDED:
            self._finish(file)
        return report

    def _finish(self, file: _File) -> None:
        header = self._headers.get(file)
        self._close(file)
        self._done.add(file)
        if header is not None:
            self._headers[file] = header
            ended = [one for one in self._headers if one not in self._open]
            for one in ended[:-MAX_ENDED]:
                del self._headers[one]

    def _close(self, file: _File) -> None:
        self._open.pop(file).reader.close()
        self._ended_at.pop(file, None)
        self._headers.pop(file, None)


def _latest(report: Report) -> float:
    """When the process was last known to do something."""
    times = [one.at for one in (*report.steps, *report.values, *report.events)]
    return max(times, default=report.header.started)
