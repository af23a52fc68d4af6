"""What was measured: medians and spreads of each case, ratios between engines, and their geometric means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ringfort.bench.options import Options

SCHEMA = 1
"""Of `Report.to_dict`; raised when a field changes its meaning or goes."""
OURS = "ringfort"


@dataclass(frozen=True)
class Timing:
    """One engine at one case. A call's time is that of its slowest rank."""

    calls: int
    median_us: float
    p10_us: float
    p90_us: float

    @classmethod
    def of(cls, ranks: Sequence[Sequence[int]]) -> Timing:
        """From the nanoseconds of every call on every rank."""
        slowest = np.max(np.array(ranks, dtype=np.int64), axis=0) / 1e3
        p10, median, p90 = (float(value) for value in np.percentile(slowest, [10, 50, 90]))
        return cls(len(slowest), median, p10, p90)


@dataclass(frozen=True)
class Row:
    """One case, all engines."""

    ranks: int
    bytes: int
    timings: Mapping[str, Timing]
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    """Engines that have no such operation, and what they said."""

    def ratio(self, engine: str) -> float | None:
        """How many times as long `engine` took as we did."""
        timing = self.timings.get(engine)
        return None if timing is None else timing.median_us / self.timings[OURS].median_us

    def gigabytes_per_second(self, engine: str = OURS) -> float:
        """Of the largest buffer on a rank, whatever the operation moved to do it (1 GB is 1e9 bytes)."""
        return self.bytes / self.timings[engine].median_us / 1e3

    def to_dict(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        engines = {
            name: {**asdict(timing), "gigabytes_per_second": self.gigabytes_per_second(name)}
            for name, timing in self.timings.items()
        }
        ratios = {name: self.ratio(name) for name in self.timings if name != OURS}
        return {
            "ranks": self.ranks,
            "bytes": self.bytes,
            "engines": engines,
            "ratios": ratios,
            "skipped": dict(self.skipped),
        }


@dataclass(frozen=True)
class Report:
    """A whole run."""

    options: Options
    machine: Mapping[str, Any]
    rows: Sequence[Row]

    def geometric_means(self, engine: str) -> dict[str, float]:
        """The geometric mean of the ratios to `engine`: for each world size by name, and `all`."""
        sizes = sorted({row.ranks for row in self.rows})
        groups = {str(ranks): [row for row in self.rows if row.ranks == ranks] for ranks in sizes}
        groups["all"] = list(self.rows)
        ratios = {name: [row.ratio(engine) for row in rows] for name, rows in groups.items()}
        known = {name: [value for value in values if value is not None] for name, values in ratios.items()}
        return {name: geometric_mean(values) for name, values in known.items() if values}

    def to_dict(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {
            "schema": SCHEMA,
            "options": asdict(self.options),
            "machine": dict(self.machine),
            "rows": [row.to_dict() for row in self.rows],
            "geometric_mean_ratios": {name: self.geometric_means(name) for name in self.options.against},
        }


def geometric_mean(values: Iterable[float]) -> float:
    """The mean for ratios: twice as fast here and twice as slow there comes out as 1."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
