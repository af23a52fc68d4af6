"""What a group tells the trace of its process: who is in it, the time in its collectives, and the bytes it sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from weakref import ref

from ringfort.errors import DistributedError
from ringfort.telemetry.metrics import DistributedMetrics
from ringfort.telemetry.step_time import Exchanged
from ringfort.telemetry.trace import Trace


class Group(Protocol):
    """A group of ranks."""

    def sent(self) -> tuple[Mapping[int, int], int]: ...


class Ranks(Protocol):
    """A backend."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def group(self) -> Group: ...


def follow_metrics(trace: Trace, metrics: DistributedMetrics) -> None:
    """Have the steps of `trace` include what `metrics` count, for as long as those exist."""
    owner = ref(metrics)

    def exchanged() -> Exchanged | None:
        found = owner()
        return None if found is None else found.exchanged()

    trace.exchange_from(exchanged)


def describe_group(trace: Trace, ranks: Ranks, **about: Any) -> None:
    """Open `trace`, if it is not open, and say there that this process is one of `ranks`. Of a sub-group nothing is
    said: its ranks have other numbers."""
    owner = ref(ranks)

    def sent() -> tuple[Mapping[int, int], int] | None:
        found = owner()
        try:
            return None if found is None else found.group.sent()
        except DistributedError:  # between two groups there is none
            return {}, 0

    trace.describe(rank=ranks.rank, world_size=ranks.world_size, **about)
    trace.sent_from(sent)
