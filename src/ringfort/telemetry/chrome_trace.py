"""Steps of a run as a trace in Chrome's format, which Perfetto (ui.perfetto.dev) and chrome://tracing show. Pure.

Each machine is a process, each rank a thread. A step is a slice with a slice for each phase in it. A trace knows how
long each phase of a step took in all, but not when: the phases are drawn one after the other, in a usual order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ringfort.telemetry.view import ENDED, Curve, RankView, RunView, ShownEvent, ShownStep, Split

PHASES: Final = ("data", "compute", "codec", "waiting", "wire", "seal")
"""In the order in which they are drawn."""
_STEPLESS: Final = (*ENDED, "learner")
"""States of ranks that make no steps."""

TraceEvent = dict[str, Any]


class TraceRecorder:
    """Gathers the next steps of each rank from views of a run."""

    def __init__(self, steps: int) -> None:
        """Gather `steps` steps of each rank that end after it was first seen."""
        self._wanted = steps
        self._before: dict[int, int] = {}
        """The latest step of each rank when it was first seen."""
        self._steps: dict[int, dict[int, ShownStep]] = {}
        self._ranks: dict[int, RankView] = {}
        self._latest = RunView(0.0)

    def take(self, view: RunView) -> None:
        """Take the next view of the same run."""
        self._latest = view
        self._ranks.update({rank.rank: rank for rank in view.ranks if rank.rank >= 0})
        for rank, steps in view.timeline.items():
            if steps:
                before, seen = self._before.setdefault(rank, steps[-1].number), self._steps.setdefault(rank, {})
                # Also those that were seen before: who waited is known when all ranks have reported.
                seen.update({step.number: step for step in steps if step.number > before})

    @property
    def seen(self) -> dict[int, int]:
        """The steps that were seen of each rank that makes steps, or has not been seen yet."""
        view = self._latest
        there = {rank.rank for rank in view.ranks if rank.rank >= 0}
        idle = {rank.rank for rank in view.ranks if rank.state in _STEPLESS}
        return {rank: len(self._steps.get(rank, ())) for rank in sorted(there.union(range(view.world_size)) - idle)}

    @property
    def is_complete(self) -> bool:
        """Whether enough steps of each rank were seen."""
        return bool(self.seen) and all(seen >= self._wanted for seen in self.seen.values())

    def missing(self) -> list[str]:
        """What is missing, in words, one for each rank that is late."""
        late = {rank: seen for rank, seen in self.seen.items() if seen < self._wanted}
        return [f"{self._title(rank)}: {seen} of {self._wanted} steps" for rank, seen in late.items()]

    def _title(self, rank: int) -> str:
        found = self._ranks.get(rank)
        return f"rank {rank}, which was not seen" if found is None else f"rank {rank} on {found.name} ({found.state})"

    @property
    def run(self) -> str:
        """The name of the run."""
        return self._latest.run

    @property
    def notice(self) -> str:
        """What a viewer should know."""
        return self._latest.notice

    @property
    def has_steps(self) -> bool:
        """Whether any step was seen."""
        return any(self._steps.values())

    def summary(self) -> str:
        """What the trace has, in words."""
        chosen = [found for found in self._chosen().values() if found]
        most, ranks = max(map(len, chosen), default=0), len(chosen)
        return f"{most} step{'s'[: most != 1]} of {ranks} rank{'s'[: ranks != 1]} of {self.run!r}"

    @property
    def has_gaps(self) -> bool:
        """Whether steps are missing between those that were seen: there were too many to be reported."""
        return any(max(steps) - min(steps) >= len(steps) for steps in self._chosen().values() if steps)

    def _chosen(self) -> dict[int, dict[int, ShownStep]]:
        """The steps of the trace: as many of each rank as are wanted."""
        firsts = {rank: sorted(steps)[: self._wanted] for rank, steps in self._steps.items()}
        last = max((numbers[-1] for numbers in firsts.values() if numbers), default=0)
        return {
            rank: {number: step for number, step in sorted(steps.items()) if number <= last}
            for rank, steps in self._steps.items()
        }

    def document(self) -> dict[str, Any]:
        """Return the trace, to be written as JSON."""
        steps = {rank: list(found.values()) for rank, found in self._chosen().items() if found}
        view = self._latest
        start = min((step.start for one in steps.values() for step in one), default=view.now)
        end = max((step.start + step.split.total for one in steps.values() for step in one), default=view.now)
        layout = _Layout(list(self._ranks.values()), start)
        events = list(layout.names())
        for rank, found in sorted(steps.items()):
            events += layout.slices(rank, found)
        for event in view.events:
            if start <= event.at <= end:
                events.append(layout.instant(event))
        for curve in view.curves:
            events += layout.counter(curve, end)
        about = {
            "run": view.run,
            "program": view.program,
            "start": start,
            "phases": "in a usual order, not as measured",
        }
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


class _Layout:
    """Where things are in the trace."""

    def __init__(self, ranks: list[RankView], start: float) -> None:
        self._ranks = {rank.rank: rank for rank in sorted(ranks, key=lambda rank: rank.rank)}
        self._start = start
        hosts = {rank.host or rank.name: rank.name for rank in self._ranks.values()}
        self._pids = {host: pid for pid, host in enumerate(hosts, 1)}
        self._names = hosts

    def _pid(self, rank: int) -> int:
        found = self._ranks[rank]
        return self._pids[found.host or found.name]

    def _at(self, seconds: float) -> float:
        """A time in microseconds since the start, to the nanosecond."""
        return round((seconds - self._start) * 1e9) / 1000

    def names(self) -> Iterator[TraceEvent]:
        """The names of processes and threads."""
        for host, pid in self._pids.items():
            yield _meta("process_name", pid, 0, name=self._names[host] or host)
            yield _meta("process_sort_index", pid, 0, sort_index=pid)
        for rank in self._ranks:
            yield _meta("thread_name", self._pid(rank), _tid(rank), name=f"rank {rank}")
            yield _meta("thread_sort_index", self._pid(rank), _tid(rank), sort_index=rank)

    def slices(self, rank: int, steps: list[ShownStep]) -> Iterator[TraceEvent]:
        """The steps of a rank. Slices of one thread must not overlap, so a step ends where the next one begins."""
        steps = sorted(steps, key=lambda step: step.start)
        ends = [*(step.start for step in steps[1:]), float("inf")]
        for step, latest in zip(steps, ends, strict=True):
            split, start = step.split, step.start
            end = min(start + split.total, latest)
            if self._at(end) <= self._at(start):
                continue
            figures = {name: round(getattr(split, name) * 1000, 3) for name in PHASES if getattr(split, name)}
            yield self._slice(rank, f"step {step.number}", "step", start, end, {"step": step.number, "ms": figures})
            yield from self._phases(rank, split, start, end)

    def _phases(self, rank: int, split: Split, start: float, end: float) -> Iterator[TraceEvent]:
        for name in PHASES:
            stop = min(start + getattr(split, name), end)
            if self._at(stop) > self._at(start):
                yield self._slice(rank, name, "phase", start, stop, {})
            start = max(start, stop)

    def _slice(self, rank: int, name: str, kind: str, start: float, end: float, args: dict[str, Any]) -> TraceEvent:
        ts = self._at(start)
        duration = round((self._at(end) - ts) * 1000) / 1000
        where = {"ts": ts, "dur": duration, "pid": self._pid(rank), "tid": _tid(rank)}
        return {"ph": "X", "name": name, "cat": kind, **where, "args": args}

    def instant(self, event: ShownEvent) -> TraceEvent:
        """Something that happened: at a rank, or in the whole run."""
        shown = {"ph": "i", "name": event.text or event.kind, "cat": event.kind or "event", "ts": self._at(event.at)}
        if event.rank in self._ranks:
            return {**shown, "s": "t", "pid": self._pid(event.rank), "tid": _tid(event.rank)}
        return {**shown, "s": "g", "pid": 1, "tid": 0}

    def counter(self, curve: Curve, end: float) -> Iterator[TraceEvent]:
        """A value over time, such as the loss."""
        for at, value in zip(curve.at, curve.values, strict=True):
            if value is not None and self._start <= at <= end:
                yield {"ph": "C", "name": curve.name, "ts": self._at(at), "pid": 1, "tid": 0, "args": {"value": value}}


def _tid(rank: int) -> int:
    """The thread of a rank: to readers of traces, thread 0 is the idle thread of the system."""
    return rank + 1


def _meta(kind: str, pid: int, tid: int, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
