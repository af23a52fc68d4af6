"""What was written during a comparison: the lines of every process and the events of the one that started them.

One folder per system: `events.jsonl`, and for each process a file of lines of JSON, which `job.say` has printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEVER = float("inf")


@dataclass
class Process:
    """One process of a member, from its start to its end."""

    member: int
    started: float
    died: float = NEVER
    was_killed: bool = False
    ready: float = NEVER
    """When its imports were done."""
    drew: list[dict[str, Any]] = field(default_factory=list)
    """`drew`: the samples of a micro-batch that it began, `number`: their pass over the data."""
    committed: list[dict[str, Any]] = field(default_factory=list)
    """`step`, `applied`: the samples in the update, `members`, `group`, `before` and `weights`: digests."""
    gave_up: list[dict[str, Any]] = field(default_factory=list)
    """Steps that were computed and not applied."""

    def take(self, line: dict[str, Any]) -> None:
        """Sort a line in."""
        if "ready" in line:
            self.ready = line["at"]
        elif "drew" in line:
            self.drew.append(line)
        elif "step" in line:
            self.committed.append(line)
        elif "gave_up" in line:
            self.gave_up.append(line)

    def until(self, end: float) -> Process:
        """Return what was known of it at a moment."""
        lists = [[line for line in lines if line["at"] <= end] for lines in (self.drew, self.committed, self.gave_up)]
        dead, ready = self.died <= end, self.ready if self.ready <= end else NEVER
        return Process(self.member, self.started, self.died if dead else NEVER, dead and self.was_killed, ready, *lists)

    @property
    def joined(self) -> float:
        """When it had first taken part in a step. Before that it may have applied some as a learner."""
        return next((line["at"] for line in self.committed if line["members"]), NEVER)

    @property
    def settled(self) -> float:
        """When what it had drawn until then was applied or given up."""
        return max((lines[-1]["at"] for lines in (self.committed, self.gave_up) if lines), default=0.0)


@dataclass
class Record:
    """All that is known of the run of one system."""

    processes: list[Process]
    events: list[dict[str, Any]]

    def phase(self, name: str) -> tuple[float, float] | None:
        """Return the beginning and the end of a phase, or None if it was not reached. One that goes on, or that was cut
        off, ends with the last line."""
        begun = next((one["at"] for one in self.of("beginning of phase") if one["name"] == name), None)
        if begun is None:
            return None
        ended = next((one["at"] for one in self.of("end of phase") if one["name"] == name), None)
        lines = (line["at"] for process in self.processes for line in process.committed[-1:])
        return begun, max((begun, *lines)) if ended is None else ended

    def until(self, end: float) -> Record:
        """Return what was known at a moment."""
        return Record([one.until(end) for one in self.processes if one.started <= end], self.events)

    def of(self, event: str, begin: float = 0.0, end: float = NEVER) -> list[dict[str, Any]]:
        """Return the events of one kind between two moments."""
        return [one for one in self.events if one["event"] == event and begin <= one["at"] <= end]


def lines_of(text: str) -> Iterable[dict[str, Any]]:
    """Yield the complete lines; the last one of a killed process may be cut."""
    for line in text.splitlines(keepends=True):
        if line.endswith("}\n"):
            yield json.loads(line)


def read(folder: Path) -> Record:
    """Return what is in the folder of a system."""
    events = list(lines_of((folder / "events.jsonl").read_text()))
    processes: dict[str, Process] = {}
    for event in events:
        if event["event"] == "start":
            made = processes[event["file"]] = Process(event["member"], event["at"])
            for line in lines_of((folder / event["file"]).read_text()):
                made.take(line)
        elif event["event"] in ("kill", "ended"):
            processes[event["file"]].died = event["at"]
            processes[event["file"]].was_killed = event["event"] == "kill"
    return Record(list(processes.values()), events)
