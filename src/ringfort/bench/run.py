"""A benchmark run: for each world size, local ranks that hold every engine; their times gathered into a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ringfort.bench.engines import ENGINES, RingfortEngine
from ringfort.bench.machine import describe_machine
from ringfort.bench.options import Case, Options
from ringfort.bench.patterns import element_type
from ringfort.bench.results import Report, Row, Timing
from ringfort.local import LocalRanks, Message

WORKER = "ringfort.bench.worker"


class Step(NamedTuple):
    """How far a run is."""

    done: float
    """Cases, with the part that is done of the one under way."""
    total: int
    case: Case
    row: Row | None
    """What was measured, when the case is done."""


def run_bench(options: Options, on_step: Callable[[Step], None]) -> Report:
    """Measure everything in `options`. Raises `RankFailedError` when a rank ends badly; leaves no process behind."""
    element_type(options.dtype)  # fail before any process starts
    names = (RingfortEngine.name, *options.against)
    machine = describe_machine(["numpy", *(ENGINES[name].package for name in names)])
    variables = {key: value for name in names for key, value in ENGINES[name].variables().items()}
    total = sum(len(options.cases(ranks)) for ranks in options.ranks)
    rows: list[Row] = []
    for ranks in options.ranks:
        collected = Collector(options.cases(ranks), ranks)
        with TemporaryDirectory(prefix="ringfort-bench-") as scratch:
            on_step(Step(len(rows), total, collected.case, None))
            with LocalRanks(WORKER, ranks, [options.to_json(), scratch], variables=variables) as group:
                for rank, message in group.messages():
                    row = collected.take(rank, message)
                    if row is not None:
                        rows.append(row)
                    on_step(Step(len(rows) + collected.part, total, collected.case, row))
    return Report(options, machine, rows)


class Collector:
    """Puts together what the ranks of one group report about each case."""

    def __init__(self, cases: Sequence[Case], ranks: int) -> None:
        self._cases = cases
        self._ranks = ranks
        self._done = 0
        self._skipped: defaultdict[int, dict[str, str]] = defaultdict(dict)
        self._times: defaultdict[int, list[dict[str, list[int]]]] = defaultdict(list)
        self.part = 0.0
        """Of the case under way, how much is done."""

    @property
    def case(self) -> Case:
        """The one under way, or the last."""
        return self._cases[min(self._done, len(self._cases) - 1)]

    def take(self, rank: int, message: Message) -> Row | None:
        """A rank's message; returns the row that it completes, if any."""
        del rank  # a row takes the slowest rank of each call, whichever it was
        nbytes = int(message["bytes"])
        if message["kind"] == "progress":
            self.part = float(message["done"]) if nbytes == self.case.nbytes else self.part
        elif message["kind"] == "skipped":
            self._skipped[nbytes][message["engine"]] = message["why"]
        else:
            reports = self._times[nbytes]
            reports.append(message["nanoseconds"])
            if len(reports) == self._ranks:
                self._done += 1
                self.part = 0.0
                timings = {name: Timing.of([report[name] for report in reports]) for name in reports[0]}
                return Row(self._ranks, nbytes, timings, self._skipped[nbytes])
        return None
