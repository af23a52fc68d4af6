"""The results: medians and spreads per case, ratios between engines, and their geometric means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ringfort.bench.options import Options

SCHEMA = 1
"""Of `Report.to_dict`; raised when a field is removed or changes its meaning."""
OURS = "ringfort"


@dataclass(frozen=True)
class Timing:
    """The times of one engine in one case. The time of a call is that of its slowest rank."""

    calls: int
    median_us: float
    p10_us: float
    p90_us: float
    rounds_us: Sequence[float] = ()
    """The median of each burst, to be compared with another engine's burst of the same round."""

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Sequence[int]]]) -> Timing:
        """From nanoseconds by round, rank and call."""
        slowest = [np.max(np.array(ranks, dtype=np.int64), axis=0) / 1e3 for ranks in rounds]
        calls = np.concatenate(slowest)
        p10, median, p90 = (float(value) for value in np.percentile(calls, [10, 50, 90]))
        return cls(len(calls), median, p10, p90, [round(float(np.median(turn)), 3) for turn in slowest])


@dataclass(frozen=True)
class Row:
    """One case, all engines."""

    ranks: int
    bytes: int
    timings: Mapping[str, Timing]
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    """Engines that have no such operation or failed, and why."""

    def ratio(self, engine: str, ours: str = OURS) -> float | None:
        """The time of `engine` divided by that of `ours`; None if one of them was not measured."""
        theirs, base = self.timings.get(engine), self.timings.get(ours)
        return None if theirs is None or base is None else theirs.median_us / base.median_us

    def ratio_spread(self, engine: str, ours: str = OURS) -> tuple[float, float] | None:
        """The 10th and 90th percentile of the ratio over the rounds."""
        theirs, base = (self.timings[name].rounds_us if name in self.timings else () for name in (engine, ours))
        ratios = [other / mine for other, mine in zip(theirs, base, strict=False)]
        return (float(np.percentile(ratios, 10)), float(np.percentile(ratios, 90))) if ratios else None

    def gigabytes_per_second(self, engine: str = OURS) -> float:
        """The size of the largest buffer per rank divided by the time (1 GB is 1e9 bytes)."""
        return self.bytes / self.timings[engine].median_us / 1e3

    def to_dict(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        engines = {
            name: {**asdict(timing), "gigabytes_per_second": self.gigabytes_per_second(name)}
            for name, timing in self.timings.items()
        }
        ratios = {name: self.ratio(name) for name in self.timings if name != OURS}
        return {"ranks": self.ranks, "bytes": self.bytes, "engines": engines, "ratios": ratios, "skipped": self.skipped}


class Report(NamedTuple):
    """A whole run."""

    options: Options
    machine: Mapping[str, Any]
    rows: Sequence[Row]

    def geometric_means(self, engine: str, ours: str = OURS) -> dict[str, float]:
        """The geometric mean of the ratios of `engine` to `ours`, per world size (as text) and for `all`."""
        sizes = sorted({row.ranks for row in self.rows})
        groups = {str(ranks): [row for row in self.rows if row.ranks == ranks] for ranks in sizes}
        groups["all"] = list(self.rows)
        ratios = {name: [row.ratio(engine, ours) for row in rows] for name, rows in groups.items()}
        known = {name: [value for value in values if value is not None] for name, values in ratios.items()}
        return {name: geometric_mean(values) for name, values in known.items() if values}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`, also after JSON."""
        rows = [
            Row(row["ranks"], row["bytes"], msgspec.convert(row["engines"], dict[str, Timing]), row["skipped"])
            for row in given["rows"]
        ]
        return cls(msgspec.convert(given["options"], Options), given["machine"], rows)

    def to_dict(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {
            "schema": SCHEMA,
            "options": asdict(self.options),
            "machine": dict(self.machine),
            "rows": [row.to_dict() for row in self.rows],
            "geometric_mean_ratios": {name: self.geometric_means(name) for name in self.options.against},
        }
