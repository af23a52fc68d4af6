"""Counts, bytes and durations of the operations of a context, cheap enough to be always on.

`DistributedMetrics` collects them; `snapshot()` returns a frozen `MetricsSnapshot` to print or to convert to JSON.
Durations are kept in a `Histogram`, whose memory does not grow with the number of values.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import floor, log
from threading import Lock
from typing import Any

import numpy as np

from ringfort.errors import InvalidArgumentError
from ringfort.telemetry.step_time import Exchanged

RELATIVE_ERROR = 0.02
"""The largest relative error of a percentile. 2% is less than runs differ, and the whole range below needs some 1,200
buckets, of which a real operation uses a few dozen."""

SMALLEST = 1e-9
"""Smaller values count as zero: a nanosecond, below the resolution of our clocks."""

LARGEST = 1e12
"""Larger values count as this in percentiles: 32,000 years in seconds, a terabyte in bytes."""

MOST_RECENT = 1024
"""Calls that are counted together."""

_MOST_KINDS = 1024
"""Kinds of calls that are counted together; a program that never repeats a call gains nothing from it."""

_REDUCING = ("all_reduce", "reduce_scatter")
"""The operations that gradients take."""

_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_BUCKETS_PER_E = 1 / log(_GAMMA)
_ZERO = floor(log(SMALLEST) * _BUCKETS_PER_E) - 1
_TOP = floor(log(LARGEST) * _BUCKETS_PER_E)


class Histogram:
    """A histogram of values of at least 0, whose buckets all span the same ratio (DDSketch, arXiv:1908.10693).

    `count`, `total` and `largest` are exact. `percentile` is within `RELATIVE_ERROR` of the true one for values from
    `SMALLEST` to `LARGEST`. Not thread-safe: its owner holds a lock.
    """

    __slots__ = ("_buckets", "count", "largest", "smallest", "total")

    def __init__(self) -> None:
        self._buckets: defaultdict[int, int] = defaultdict(int)
        self.count = 0
        self.total = 0.0
        self.smallest = math.inf
        self.largest = 0.0

    def record(self, value: float) -> None:
        """Add a value. Raises `InvalidArgumentError` if it is negative, infinite or NaN."""
        if SMALLEST <= value < LARGEST:
            bucket = floor(log(value) * _BUCKETS_PER_E)
        elif 0 <= value < math.inf:
            bucket = _ZERO if value < SMALLEST else _TOP
        else:
            raise InvalidArgumentError("value", value, "must be finite and at least 0")
        self._buckets[bucket] += 1
        self.count += 1
        self.total += value
        if value > self.largest:
            self.largest = value
        if value < self.smallest:
            self.smallest = value

    def record_all(self, values: Sequence[float]) -> None:
        """Add many values, at a tenth of the cost of `record`."""
        array = np.asarray(values)
        if not len(array) or array.min() < SMALLEST or not array.max() < LARGEST:
            for value in values:
                self.record(value)
            return
        buckets, counts = np.unique(np.floor(np.log(array) * _BUCKETS_PER_E).astype(int), return_counts=True)
        for bucket, held in zip(buckets.tolist(), counts.tolist(), strict=True):
            self._buckets[bucket] += held
        self.count += len(array)
        self.total += float(array.sum())
        self.largest = max(self.largest, float(array.max()))
        self.smallest = min(self.smallest, float(array.min()))

    def percentile(self, percent: float) -> float:
        """Return the smallest value that at least `percent` % of the values do not exceed; 0 if there are none.

        Raises `InvalidArgumentError` for a percentage outside 0 to 100.
        """
        if not 0 <= percent <= 100:
            raise InvalidArgumentError("percent", percent, "must be from 0 to 100")
        wanted, seen = max(1, math.ceil(self.count * percent / 100)), 0
        for bucket, held in sorted(self._buckets.items()):
            seen += held
            if seen >= wanted:
                # The point of a bucket with the least relative error to both ends, within the range of the values.
                value = 0.0 if bucket == _ZERO else 2 * math.exp((bucket + 1) / _BUCKETS_PER_E) / (_GAMMA + 1)
                return min(max(value, self.smallest), self.largest)
        return 0.0


@dataclass(frozen=True)
class OperationSnapshot:
    """The numbers of one operation. Bytes and durations are those of successful calls: how much a failed call moved is
    unknown, and its duration says more about the timeout than about the network."""

    count: int
    """Calls, including failed ones."""
    failures: int
    """Failed calls."""
    bytes: int
    """Bytes of the arrays that were passed."""
    seconds_total: float
    """Seconds in all calls together."""
    p50: float
    """The median duration in seconds. All percentiles are within 2% of the true one."""
    p95: float
    """The 95th percentile of the duration in seconds."""
    p99: float
    """The 99th percentile of the duration in seconds."""
    max: float
    """The longest duration in seconds, exact."""


@dataclass(frozen=True)
class CompressionSnapshot:
    """The numbers of one compression strategy, over all arrays."""

    count: int = 0
    """Arrays, or buckets of arrays."""
    bytes_before: int = 0
    """Bytes that this rank would have sent without compression."""
    bytes_after: int = 0
    """Bytes that it has sent."""
    codec_seconds: float = 0.0
    """Seconds spent on encoding and decoding."""
    residual_norm: float = 0.0
    """The norm of the last array's residual (error feedback); 0 without error feedback."""
    nonfinite: int = 0
    """Elements that were infinite or NaN, and were skipped or clipped."""

    @property
    def ratio(self) -> float:
        """The compression ratio: `bytes_before / bytes_after`."""
        return self.bytes_before / self.bytes_after if self.bytes_after else 1.0


@dataclass(frozen=True)
class MetricsSnapshot:
    """What a context did since it was created, or since `reset()`. `print` shows it as a table.

    print(ctx.metrics_snapshot())
    json.dumps(ctx.metrics_snapshot().to_dict())
    """

    operations: Mapping[str, OperationSnapshot]
    """By name, in alphabetical order."""
    bytes_sent: int
    """Bytes sent to other ranks."""
    bytes_received: int
    """Bytes received from other ranks."""
    messages_sent: int
    """Messages sent to other ranks."""
    messages_received: int
    """Messages received from other ranks."""
    compression: Mapping[str, CompressionSnapshot] = field(default_factory=dict[str, CompressionSnapshot])
    """By the name of the strategy, in alphabetical order; `none` is what AUTO did not compress."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, ready for `json.dumps`. Durations are in seconds."""
        compression = {name: {**asdict(one), "ratio": one.ratio} for name, one in self.compression.items()}
        return {**asdict(self), "compression": compression}

    def __str__(self) -> str:
        head = ("operation", "count", "failed", "bytes", "total", "p50", "p95", "p99", "max")
        rows = [head, *(_row(name, operation) for name, operation in self.operations.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [
            "  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])))  # numbers to the right
            for row in rows
        ]
        lines.append(f"sent {binary_size(self.bytes_sent)} in {self.messages_sent} messages")
        lines.append(f"received {binary_size(self.bytes_received)} in {self.messages_received} messages")
        for name, one in self.compression.items():
            sizes = f"{binary_size(one.bytes_before)} as {binary_size(one.bytes_after)} ({one.ratio:.1f} times fewer)"
            lines.append(f"compressed by {name}: {sizes}, {_duration(one.codec_seconds)} in the codec")
        return "\n".join(lines)


@dataclass(slots=True)
class _Operation:
    failures: int = 0
    nbytes: int = 0
    durations: Histogram = field(default_factory=Histogram)

    def snapshot(self) -> OperationSnapshot:
        durations = self.durations
        return OperationSnapshot(
            count=durations.count + self.failures,
            failures=self.failures,
            bytes=self.nbytes,
            seconds_total=durations.total,
            p50=durations.percentile(50),
            p95=durations.percentile(95),
            p99=durations.percentile(99),
            max=durations.largest,
        )


@dataclass(slots=True)
class _Recent:
    """Calls that are counted together."""

    reduced: int
    """Bytes that each of them reduces."""
    durations: list[float] = field(default_factory=list[float])
    seen: int = 0
    """How many of them `exchanged` knows."""


class DistributedMetrics:
    """Collects the numbers of one context, from any thread. A record costs about a microsecond.

    `ctx.metrics` is one; `ctx.metrics_snapshot()` returns its `snapshot()`.
    """

    def __init__(self) -> None:
        # One lock for everything: it is held for less than a microsecond, and makes a snapshot consistent.
        self._lock = Lock()
        self._recent: dict[tuple[str, int], _Recent] = {}
        self._seconds = 0.0
        """What `exchanged` returns next."""
        self.reset()

    def reset(self) -> None:
        """Set all numbers to zero."""
        with self._lock:
            for recent in self._recent.values():
                self._look_at(recent)
                recent.durations.clear()
                recent.seen = 0
            self._reduced = 0
            self._operations: defaultdict[str, _Operation] = defaultdict(_Operation)
            self._compression: defaultdict[str, CompressionSnapshot] = defaultdict(CompressionSnapshot)
            self._traffic = {"bytes_sent": 0, "bytes_received": 0, "messages_sent": 0, "messages_received": 0}

    def record_operation(self, name: str, seconds: float, nbytes: int, failed: bool = False) -> None:
        """Count a call of `name`. For a failed call, `seconds` and `nbytes` are ignored.

        Raises `InvalidArgumentError` if the duration is negative, infinite or NaN; nothing is counted then.
        """
        with self._lock:
            operation = self._operations.get(name) or _Operation()
            if failed:
                operation.failures += 1
            else:
                operation.durations.record(seconds)
                operation.nbytes += nbytes
            self._operations[name] = operation

    def recent(self, name: str, nbytes: int) -> list[float] | None:
        """Return a list to which the durations of successful calls of `name` with `nbytes` can be appended: for callers
        that cannot spare the microsecond of `record_operation`. A snapshot counts them; call `count_recent` when there
        are `MOST_RECENT`. None if there are too many such lists."""
        with self._lock:
            found = self._recent.get((name, nbytes))
            if found is None:
                if len(self._recent) >= _MOST_KINDS:
                    return None
                found = self._recent[name, nbytes] = _Recent(nbytes if name in _REDUCING else 0)
            return found.durations

    def count_recent(self) -> None:
        """Count what is in the lists that `recent` returned."""
        with self._lock:
            for (name, nbytes), recent in self._recent.items():
                self._look_at(recent)
                taken = recent.durations[: recent.seen]
                del recent.durations[: recent.seen]  # another thread may just be appending
                recent.seen = 0
                if taken:
                    self._operations[name].durations.record_all(taken)
                    self._operations[name].nbytes += nbytes * len(taken)

    def exchanged(self) -> Exchanged:
        """Return the seconds in the lists that `recent` returned, and the bytes that were reduced, since the last call.
        Takes about a microsecond: what is in the lists is not counted yet."""
        with self._lock:
            reduced = sum(self._operations[name].nbytes for name in _REDUCING if name in self._operations)
            for recent in self._recent.values():
                if len(recent.durations) != recent.seen:
                    self._look_at(recent)
                reduced += recent.reduced * recent.seen
            found = Exchanged(self._seconds, reduced - self._reduced)
            self._seconds, self._reduced = 0.0, reduced
            return found

    def _look_at(self, recent: _Recent) -> None:
        """Add what is new in a list to what `exchanged` returns. `_lock` is held."""
        new = recent.durations[recent.seen :]
        recent.seen += len(new)
        self._seconds += sum(new)

    def record_compression(
        self,
        strategy: str,
        *,
        nbytes: int,
        sent: int,
        codec_seconds: float = 0.0,
        residual: float = 0.0,
        nonfinite: int = 0,
    ) -> None:
        """Count an array that `strategy` compressed: `nbytes` would have been sent without it, `sent` were."""
        with self._lock:
            last = self._compression[strategy]
            self._compression[strategy] = CompressionSnapshot(
                last.count + 1,
                last.bytes_before + nbytes,
                last.bytes_after + sent,
                last.codec_seconds + codec_seconds,
                residual,
                last.nonfinite + nonfinite,
            )

    def add_sent(self, nbytes: int, messages: int = 1) -> None:
        """Count what was sent to a peer."""
        with self._lock:
            self._traffic["bytes_sent"] += nbytes
            self._traffic["messages_sent"] += messages

    def add_received(self, nbytes: int, messages: int = 1) -> None:
        """Count what was received from a peer."""
        with self._lock:
            self._traffic["bytes_received"] += nbytes
            self._traffic["messages_received"] += messages

    def snapshot(self) -> MetricsSnapshot:
        """Return the current numbers."""
        self.count_recent()
        with self._lock:
            return MetricsSnapshot(
                operations={name: operation.snapshot() for name, operation in sorted(self._operations.items())},
                compression=dict(sorted(self._compression.items())),
                **self._traffic,
            )


def _row(name: str, operation: OperationSnapshot) -> tuple[str, ...]:
    times = (operation.seconds_total, operation.p50, operation.p95, operation.p99, operation.max)
    counts = (str(operation.count), str(operation.failures), binary_size(operation.bytes))
    return (name, *counts, *(_duration(seconds) for seconds in times))


def binary_size(nbytes: int) -> str:
    """Return a size, such as `512 B` or `1.5 MiB`."""
    scaled, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while scaled >= 1024 and len(units) > 1:
        scaled, units = scaled / 1024, units[1:]
    return f"{nbytes} B" if units[0] == "B" else f"{scaled:.1f} {units[0]}"


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds / scale:.0f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
