"""Counts, bytes and durations of a context's operations, cheap enough to be always on.

`DistributedMetrics` collects, `snapshot()` gives a frozen `MetricsSnapshot` to print or to turn into JSON. Durations go
into a `Histogram`, whose memory does not grow with the number of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import floor, log
from threading import Lock
from typing import Any

import numpy as np

from ringfort.errors import InvalidArgumentError

RELATIVE_ERROR = 0.02
"""How far a percentile may be from the true one, as a share of it. 2% is finer than any run repeats, and the whole
range below then needs some 1,200 buckets, of which a real operation touches a few dozen."""

SMALLEST = 1e-9
"""Smaller values count as zero: a nanosecond, below what any clock here resolves."""

LARGEST = 1e12
"""Larger values count as this in percentiles: 32,000 years in seconds, a terabyte in bytes."""

MOST_RECENT = 1024
"""Calls that wait to be counted together."""

_MOST_KINDS = 1024
"""Of which such calls are kept: a program that never repeats itself gains nothing by them."""

_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_BUCKETS_PER_E = 1 / log(_GAMMA)
_ZERO = floor(log(SMALLEST) * _BUCKETS_PER_E) - 1
_TOP = floor(log(LARGEST) * _BUCKETS_PER_E)


class Histogram:
    """Values of at least 0 in buckets that each span the same ratio (as in DDSketch, arXiv:1908.10693).

    `count`, `total` and `largest` are exact. `percentile` is within `RELATIVE_ERROR` of the true one for values from
    `SMALLEST` to `LARGEST`. Not thread-safe: its owner holds the lock.
    """

    __slots__ = ("_buckets", "count", "largest", "smallest", "total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.smallest = math.inf
        self.largest = 0.0

    def record(self, value: float) -> None:
        """Adds a value. Raises `InvalidArgumentError` for one that is negative, infinite or no number."""
        if SMALLEST <= value < LARGEST:
            bucket = floor(log(value) * _BUCKETS_PER_E)
        else:
            bucket = _outer_bucket(value)
        try:
            self._buckets[bucket] += 1
        except KeyError:
            self._buckets[bucket] = 1
        self.count += 1
        self.total += value
        if value > self.largest:
            self.largest = value
        if value < self.smallest:
            self.smallest = value

    def record_all(self, values: Sequence[float]) -> None:
        """`record` of each, for a tenth of its cost where there are many."""
        array = np.asarray(values)
        if not len(array) or array.min() < SMALLEST or not array.max() < LARGEST:
            for value in values:
                self.record(value)
            return
        buckets, counts = np.unique(np.floor(np.log(array) * _BUCKETS_PER_E).astype(int), return_counts=True)
        for bucket, held in zip(buckets.tolist(), counts.tolist(), strict=True):
            self._buckets[bucket] = self._buckets.get(bucket, 0) + held
        self.count += len(array)
        self.total += float(array.sum())
        self.largest = max(self.largest, float(array.max()))
        self.smallest = min(self.smallest, float(array.min()))

    def percentile(self, percent: float) -> float:
        """The smallest value that at least `percent` of 100 of the values do not exceed; 0 when there are none.

        Raises `InvalidArgumentError` for a percentage outside 0 to 100.
        """
        if not 0 <= percent <= 100:
            raise InvalidArgumentError("percent", percent, "must be from 0 to 100")
        wanted, seen = max(1, math.ceil(self.count * percent / 100)), 0
        for bucket, held in sorted(self._buckets.items()):
            seen += held
            if seen >= wanted:
                return self._value_of(bucket)
        return 0.0

    def _value_of(self, bucket: int) -> float:
        # The point of a bucket with the least relative error to both ends, kept within what was really seen.
        value = 0.0 if bucket == _ZERO else 2 * math.exp((bucket + 1) / _BUCKETS_PER_E) / (_GAMMA + 1)
        return min(max(value, self.smallest), self.largest)


def _outer_bucket(value: float) -> int:
    if not 0 <= value < math.inf:
        raise InvalidArgumentError("value", value, "a histogram takes finite values of at least 0")
    return _ZERO if value < SMALLEST else _TOP


@dataclass(frozen=True)
class OperationSnapshot:
    """One operation's numbers. Bytes and durations are those of the calls that succeeded: a failed call moved no known
    amount, and the time it took says more about the timeout than about the network."""

    count: int
    """Calls, failed ones included."""
    failures: int
    bytes: int
    seconds_total: float
    p50: float
    """Seconds; this and the other percentiles are within 2% of the true one."""
    p95: float
    p99: float
    max: float
    """Seconds, exact."""


@dataclass(frozen=True)
class CompressionSnapshot:
    """What one strategy of compression did, over all arrays that went through it."""

    count: int
    """Arrays, or buckets of them."""
    bytes_before: int
    """What this rank would have sent without compression."""
    bytes_after: int
    """What it has sent."""
    codec_seconds: float
    """Time spent on writing and reading the compressed form."""
    residual_norm: float
    """The length of what the last array left unsent, to be sent with the next; 0 where nothing is kept."""
    nonfinite: int
    """Elements that were infinite or not a number, and were skipped or clipped."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes: `bytes_before / bytes_after`."""
        return self.bytes_before / self.bytes_after if self.bytes_after else 1.0


@dataclass(frozen=True)
class MetricsSnapshot:
    """What a context did since it was made, or since `reset()`."""

    operations: Mapping[str, OperationSnapshot]
    """By name, in alphabetical order."""
    bytes_sent: int
    bytes_received: int
    messages_sent: int
    messages_received: int
    compression: Mapping[str, CompressionSnapshot] = field(default_factory=dict[str, CompressionSnapshot])
    """By the strategy's name, in alphabetical order; `none` is what AUTO left alone."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, ready for `json.dumps`. Durations are in seconds."""
        return {
            "operations": {name: asdict(operation) for name, operation in self.operations.items()},
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "messages_sent": self.messages_sent,
            "messages_received": self.messages_received,
            "compression": {name: {**asdict(one), "ratio": one.ratio} for name, one in self.compression.items()},
        }

    def __str__(self) -> str:
        head = ("operation", "count", "failed", "bytes", "total", "p50", "p95", "p99", "max")
        rows = [head, *(_row(name, operation) for name, operation in self.operations.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [
            "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells))
            for cells in (list(zip(row, widths, strict=True)) for row in rows)
        ]
        lines.append(f"sent {_size(self.bytes_sent)} in {self.messages_sent} messages")
        lines.append(f"received {_size(self.bytes_received)} in {self.messages_received} messages")
        for name, one in self.compression.items():
            sizes = f"{_size(one.bytes_before)} as {_size(one.bytes_after)} ({one.ratio:.1f} times fewer)"
            lines.append(f"compressed by {name}: {sizes}, {_duration(one.codec_seconds)} in the codec")
        return "\n".join(lines)


class _Operation:
    __slots__ = ("durations", "failures", "nbytes")

    def __init__(self) -> None:
        self.failures = 0
        self.nbytes = 0
        self.durations = Histogram()

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


class DistributedMetrics:
    """The numbers of one context, written by any of its threads. A record costs about a microsecond."""

    def __init__(self) -> None:
        # One lock for all: it is held for well under a microsecond, and so a snapshot is of one moment.
        self._lock = Lock()
        self._recent: dict[tuple[str, int], list[float]] = {}
        self._clear()

    def _clear(self) -> None:
        for durations in self._recent.values():
            durations.clear()
        self._operations: dict[str, _Operation] = {}
        self._compression: dict[str, CompressionSnapshot] = {}
        self._bytes_sent = 0
        self._bytes_received = 0
        self._messages_sent = 0
        self._messages_received = 0

    def record_operation(self, name: str, seconds: float, nbytes: int, failed: bool = False) -> None:
        """Counts a call of `name`. Of a failed one neither `seconds` nor `nbytes` is kept.

        Raises `InvalidArgumentError` for a duration that is negative, infinite or no number; nothing is counted then.
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
        """A list of calls of `name` with so many bytes that went well, in seconds: for who cannot spare the microsecond
        of `record_operation`. A snapshot counts them; `count_recent` is for when there are `MOST_RECENT`. None if there
        are too many such lists."""
        with self._lock:
            if len(self._recent) >= _MOST_KINDS:
                return self._recent.get((name, nbytes))
            return self._recent.setdefault((name, nbytes), [])

    def count_recent(self) -> None:
        """Counts what is in the lists that `recent` gave."""
        with self._lock:
            self._count_recent()

    def _count_recent(self) -> None:
        for (name, nbytes), durations in self._recent.items():
            taken = durations[:]
            del durations[: len(taken)]  # another thread may just be appending
            if taken:
                operation = self._operations.setdefault(name, _Operation())
                operation.durations.record_all(taken)
                operation.nbytes += nbytes * len(taken)

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
        """Counts an array that went by `strategy`: bytes that would have been sent, and that were."""
        with self._lock:
            last = self._compression.get(strategy) or CompressionSnapshot(0, 0, 0, 0.0, 0.0, 0)
            self._compression[strategy] = CompressionSnapshot(
                last.count + 1,
                last.bytes_before + nbytes,
                last.bytes_after + sent,
                last.codec_seconds + codec_seconds,
                residual,
                last.nonfinite + nonfinite,
            )

    def add_sent(self, nbytes: int, messages: int = 1) -> None:
        """Counts what left for a peer."""
        with self._lock:
            self._bytes_sent += nbytes
            self._messages_sent += messages

    def add_received(self, nbytes: int, messages: int = 1) -> None:
        """Counts what came from a peer."""
        with self._lock:
            self._bytes_received += nbytes
            self._messages_received += messages

    def snapshot(self) -> MetricsSnapshot:
        """The numbers of this moment."""
        with self._lock:
            self._count_recent()
            return MetricsSnapshot(
                operations={name: operation.snapshot() for name, operation in sorted(self._operations.items())},
                bytes_sent=self._bytes_sent,
                bytes_received=self._bytes_received,
                messages_sent=self._messages_sent,
                messages_received=self._messages_received,
                compression=dict(sorted(self._compression.items())),
            )

    def reset(self) -> None:
        """Starts again from nothing."""
        with self._lock:
            self._clear()


def _row(name: str, operation: OperationSnapshot) -> tuple[str, ...]:
    times = (operation.seconds_total, operation.p50, operation.p95, operation.p99, operation.max)
    counts = (str(operation.count), str(operation.failures), _size(operation.bytes))
    return (name, *counts, *(_duration(seconds) for seconds in times))


def _size(nbytes: int) -> str:
    scaled, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while scaled >= 1024 and len(units) > 1:
        scaled, units = scaled / 1024, units[1:]
    return f"{nbytes} B" if units[0] == "B" else f"{scaled:.1f} {units[0]}"


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds / scale:.0f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
