"""`ringfort bench --explain`: every strategy, predicted and measured, and the choice of AUTO.

All strategies run in the same processes, and `Schedule` measures them as it measures engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ringfort.bench.machine import describe_machine
from ringfort.bench.options import STRATEGIES, Options
from ringfort.bench.results import OURS
from ringfort.bench.runner import Ask, Schedule
from ringfort.bench.workers import start_workers
from ringfort.errors import InvalidArgumentError

AUTO = "auto"


@dataclass(frozen=True)
class Explained:
    """One size among some ranks. Times in microseconds."""

    ranks: int
    bytes: int
    chosen: str
    """What AUTO chose."""
    predicted: dict[str, float]
    measured: dict[str, float]
    """Medians, also of AUTO; a call takes as long as its slowest rank."""
    connections: int = 1
    """Connections per link that the call used. The predictions are for one."""
    compression: str = ""
    """What `compression="auto"` chooses and why, in words; empty if the array cannot be compressed."""
    compressed: dict[str, float] = field(default_factory=dict[str, float])
    """The prediction for each compression strategy that was considered; empty on one host, where none is."""

    @property
    def best(self) -> str:
        """The fastest strategy."""
        return min((name for name in self.measured if name != AUTO), key=self.measured.__getitem__)

    @property
    def over_best(self) -> float:
        """The time of AUTO divided by the time of the fastest strategy."""
        return self.measured[AUTO] / self.measured[self.best]

    def to_dict(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {**asdict(self), "best": self.best, "auto_over_best": self.over_best}


class Explanation(NamedTuple):
    """A whole run."""

    options: Options
    machine: dict[str, Any]
    rows: list[Explained]

    def to_dict(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        rows = [row.to_dict() for row in self.rows]
        return {"schema": 1, "options": asdict(self.options), "machine": self.machine, "rows": rows}


def check_explainable(options: Options) -> None:
    """Raise `InvalidArgumentError` for an operation without strategies."""
    if options.op not in STRATEGIES:
        raise InvalidArgumentError("op", options.op, f"has no strategies; choose one of: {', '.join(STRATEGIES)}")


def explain(options: Options, on_row: Callable[[Explained], None]) -> Explanation:
    """Measure everything in `options`.

    Raises `InvalidArgumentError` for an operation without strategies, `WorkersFailedError` if a rank fails.
    """
    check_explainable(options)
    found = Explanation(options, describe_machine(["numpy", "ringfort"]), [])
    for ranks in options.ranks:
        with start_workers(OURS, options, ranks) as workers:
            for case in options.cases(ranks):
                choice = workers.ask(do="explain", case=asdict(case))[0]
                names = (AUTO, *choice["predicted"])
                strategies: dict[str, Ask] = {name: partial(workers.ask, strategy=name) for name in names}
                timings = Schedule(strategies, {}, options).measure(case, lambda _: None).timings
                measured = {name: timing.median_us for name, timing in timings.items()}
                found.rows.append(Explained(ranks, case.nbytes, measured=measured, **choice))
                on_row(found.rows[-1])
            workers.ask(do="end")
    return found
