"""`Totals`: what the ranks of one machine have done since they were first looked at, added up from their traces.

A rank that was started again has another process and another trace, and its counts go on where they were. A process
whose rank changes, in an elastic run, counts for its new rank from then on. So no count ever becomes smaller.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ringfort.errors import ProtocolError
from ringfort.telemetry.folder import traces
from ringfort.telemetry.records import AnyRecord, Event, Header, Sent, Step, Values
from ringfort.telemetry.trace_file import TraceReader

PHASES: Final = ("compute", "data", "exchange", "codec", "seal")
"""Where the time of a step goes, as `records.Step` has it."""
MAX_NAMES: Final = 200
"""Names of values, and kinds of events, per rank: a program that makes up a name in each step must not fill the
memory. Further values are left out."""
OTHER: Final = "other"
"""The kind of events that have further kinds."""


def _counts() -> defaultdict[str, int]:
    return defaultdict(int)


@dataclass
class RankTotals:
    """One rank."""

    header: Header
    """Of its latest process."""
    is_alive: bool = True
    step: int = 0
    """The latest."""
    steps: int = 0
    samples: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """In steps, by phase."""
    values: dict[str, float] = field(default_factory=dict[str, float])
    """The latest of each name."""
    events: defaultdict[str, int] = field(default_factory=_counts)
    """By kind."""
    sent: defaultdict[int, int] = field(default_factory=lambda: defaultdict[int, int](int))
    """Bytes, by the rank that they were sent to."""
    received: int = 0
    """Bytes."""
    lost: int = 0
    """Records that were overwritten in the trace before they were read."""

    def add(self, record: Step | Values | Event) -> None:
        """Count a record."""
        match record:
            case Step():
                self.steps += 1
                self.samples += record.samples
                for phase in PHASES:
                    self.seconds[phase] += getattr(record, phase)
            case Values(values=values):
                for name, value in values.items():
                    if name in self.values or len(self.values) < MAX_NAMES:
                        self.values[name] = value
            case Event(kind=kind):
                self.events[kind if kind in self.events or len(self.events) < MAX_NAMES else OTHER] += 1


class _Process:
    """One process whose trace is read."""

    def __init__(self, reader: TraceReader) -> None:
        self.reader = reader
        self._sent: dict[int, int] = {}
        self._received = 0
        self._lost = 0

    def header(self) -> Header | None:
        """Who it is; None as long as it has no rank."""
        with suppress(ProtocolError):
            header = self.reader.header()
            return header if header.rank >= 0 else None
        return None

    def read(self, totals: RankTotals) -> None:
        """Add what is new to the totals of its rank."""
        for record in self.reader.new_records():
            self._add(totals, record)
        totals.lost += self.reader.lost - self._lost
        self._lost = self.reader.lost

    def _add(self, totals: RankTotals, record: AnyRecord) -> None:
        if not isinstance(record, Sent):
            totals.add(record)
            return
        for rank, count in record.sent.items():
            totals.sent[rank] += _increase(self._sent.get(rank, 0), count)
            self._sent[rank] = count
        totals.received += _increase(self._received, record.received)
        self._received = record.received


def _increase(before: int, now: int) -> int:
    """How far a count rose. Groups that follow each other in one process begin at 0."""
    return now - before if now >= before else now


class Totals:
    """The ranks whose traces are in one folder. For one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.ranks: dict[int, RankTotals] = {}
        self._folder = folder
        self._processes: dict[Path, _Process] = {}
        self._ended: set[Path] = set()
        """Traces that were read to their end and are still there."""

    def read(self) -> None:
        """Read what is new in all traces."""
        self._open_new()
        # Whether a process runs is asked before its records are read: those of one that has ended are then complete.
        found = [(process.reader.is_alive(), path, process) for path, process in self._processes.items()]
        known = [(is_alive, header, process) for is_alive, _, process in found if (header := process.header())]
        for totals in self.ranks.values():
            totals.is_alive = False  # also if its process has another rank now
        # Of several processes with one rank the latest that runs is the rank, so it comes last.
        for is_alive, header, process in sorted(known, key=lambda one: (one[0], one[1].started)):
            totals = self.ranks.setdefault(header.rank, RankTotals(header))
            totals.header, totals.is_alive, totals.step = header, is_alive, process.reader.step
            process.read(totals)
        for is_alive, path, _ in found:
            if not is_alive:
                self._close(path)
                self._ended.add(path)

    def _open_new(self) -> None:
        found = set(traces(self._folder))
        self._ended &= found
        for path in found - self._ended - self._processes.keys():
            with suppress(OSError, ProtocolError):  # it has just ended, or is just being created
                self._processes[path] = _Process(TraceReader(path))

    def _close(self, path: Path) -> None:
        self._processes.pop(path).reader.close()

    def close(self) -> None:
        """Close all traces. Idempotent."""
        for path in list(self._processes):
            self._close(path)
