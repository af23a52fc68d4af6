"""`Reduction`: adds up the sums of all members, bucket by bucket, each as soon as its gradients are there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, Final

import numpy as np

from ringfort.context import DistributedContext
from ringfort.errors import DistributedError
from ringfort.torch.training.inspector import Inspector
from ringfort.torch.training.staging import DeviceStaging, HostStaging
from ringfort.training.elastic.digests import Inspection
from ringfort.training.elastic.exchange import SUMS
from ringfort.training.elastic.local_sum import Bucket
from ringfort.training.elastic.sample_order import Array

_FOREVER: Final = 1e6
"""Seconds. The reductions have the timeout of their group."""


class Reduction:
    """One reduction of all buckets. Every member reduces them in the same order, whenever their gradients come."""

    def __init__(
        self,
        context: DistributedContext,
        buckets: Sequence[Bucket],
        staging: HostStaging | DeviceStaging,
        inspector: Inspector,
    ) -> None:
        self._context = context
        self._buckets = buckets
        self._staging = staging
        self._inspector = inspector
        self._total = {kind: staging.memory.take(kind, size) for kind, size in staging.sizes.items()}
        staging.begin(self._total)
        self._buckets_of: dict[int, list[int]] = defaultdict(list)
        """The numbers of the buckets that a gradient is in."""
        for number, bucket in enumerate(buckets):
            for place in bucket.places:
                self._buckets_of[place].append(number)
        self._missing = [len(bucket.places) for bucket in buckets]
        self._fetching: list[Callable[[], bool] | None] = []
        """Of the buckets that are on the way to the host: how to ask whether they are there."""
        self._works: list[Any] = []
        self._lock = Lock()
        beside = {SUMS: np.empty(2)}  # it comes after the gradients
        self.inspection = Inspection({**self._total, **beside}, context.rank, context.world_size)

    def is_free(self, place: int) -> bool:
        """Return whether a gradient may still be added to: its bucket is not on its way."""
        return self._buckets_of[place][0] >= len(self._fetching)

    def arrived(self, place: int) -> None:
        """The gradient at `place` of the layout is complete. In torch's threads."""
        with self._lock:
            for number in self._buckets_of[place]:
                self._missing[number] -= 1
            while len(self._fetching) < len(self._buckets) and not self._missing[len(self._fetching)]:
                self._fetch()
            with suppress(DistributedError):  # the epoch has ended; `finish` finds the same, and the program need not
                self._send(waits=False)

    def finish(self, complete: Callable[[Array], None]) -> dict[str, Array]:
        """Reduce what is left, and wait for all. `complete` gets the bucket with place 0, once that is on the host.
        Return the results by element type."""
        with self._lock:
            is_alone = not self._fetching and len(self._buckets) == 1
            while len(self._fetching) < len(self._buckets):
                self._fetch()
            if is_alone:  # in this thread, which is faster than to wake another
                self._context.all_reduce(**self._arguments(self._buckets[0], complete))
                self._staging.returned(self._buckets[0], self._total)
            else:
                self._send(waits=True, complete=complete)
        for bucket, work in zip(self._buckets, self._works, strict=False):
            work.wait(_FOREVER)  # with a limit it does not do the work itself: this thread looks at results meanwhile
            self.inspection.complete(self._total, bucket.kind, bucket.begin)
        return self._total

    def _fetch(self) -> None:
        """Begin to copy the next bucket to the host."""
        self._fetching.append(self._staging.fetch(self._buckets[len(self._fetching)], self._total))

    def _send(self, *, waits: bool, complete: Callable[[Array], None] | None = None) -> None:
        """Issue the reductions of the buckets that are on the host, in order; with `waits`, of all."""
        while len(self._works) < len(self._fetching):
            is_there = self._fetching[len(self._works)]
            if not waits and is_there is not None and not is_there():
                return
            bucket = self._buckets[len(self._works)]
            work = self._context.all_reduce(**self._arguments(bucket, complete), async_op=True)
            self._works.append(work)
            work.add_done_callback(partial(self._returned, bucket))

    def _arguments(self, bucket: Bucket, complete: Callable[[Array], None] | None) -> dict[str, Any]:
        """Return the arguments of the all-reduce of a bucket."""
        mine = self._staging.fetched(bucket, self._total)
        if complete is not None and 0 in bucket.places:
            complete(mine)
        total = self._total[bucket.kind][bucket.begin : bucket.end]
        return {"x": mine} if mine.ctypes.data == total.ctypes.data else {"x": mine, "out": total}

    def _returned(self, bucket: Bucket, work: Any) -> None:
        """The result of a bucket is there. In the thread of the group, which has the next bucket to reduce: so another
        one looks at the result."""
        if work.exception() is None:
            self._staging.returned(bucket, self._total)
            self._inspector.do(partial(self.inspection.complete, self._total, bucket.kind, bucket.begin))
