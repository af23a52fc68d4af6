"""What processes have written into their traces, read after they have ended or while they run."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ringfort.telemetry.folder import traces
from ringfort.telemetry.records import Event, Header, Sent, Step, Values
from ringfort.telemetry.trace_file import TraceReader


@dataclass
class Written:
    """The trace of one process."""

    header: Header
    step: int
    steps: list[Step] = field(default_factory=list[Step])
    values: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    """By name and step."""
    events: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    sent: list[Sent] = field(default_factory=list[Sent])

    @property
    def numbers(self) -> list[int]:
        """The numbers of the steps whose times are known."""
        return [step.number for step in self.steps]

    @property
    def samples(self) -> list[int]:
        """The samples of each of them."""
        return [step.samples for step in self.steps]

    def total(self, phase: str) -> float:
        """The seconds of all steps in one phase."""
        return sum(getattr(step, phase) for step in self.steps)

    def usual(self, phase: str) -> float:
        """The median of the seconds of a step in one phase."""
        return median(getattr(step, phase) for step in self.steps)

    def least(self, phase: str) -> float:
        """The same of the step in which it was shortest: what other work of the machine has not made longer."""
        return min(getattr(step, phase) for step in self.steps)


def read(path: Path) -> Written:
    """Return what is in one trace."""
    with closing(TraceReader(path)) as reader:
        found = Written(reader.header(), reader.step)
        for record in reader.new_records():
            match record:
                case Step():
                    found.steps.append(record)
                case Values(step=step, values=values):
                    for name, value in values.items():
                        found.values.setdefault(name, {})[step] = value
                case Event(kind=kind, text=text):
                    found.events.append((kind, text))
                case Sent():
                    found.sent.append(record)
        return found


def by_rank(folder: Path) -> list[Written]:
    """Return all traces in a folder, in the order of the ranks that their processes had last."""
    return sorted((read(path) for path in traces(folder)), key=lambda written: written.header.rank)
