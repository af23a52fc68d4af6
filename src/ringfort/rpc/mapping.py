"""`run_map`: calls for many items over several workers, of which faster ones get more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

from ringfort.errors import RpcNoConnectionError, RpcPeerLostError
from ringfort.rpc.calls import RpcFuture


class MapProgress(NamedTuple):
    """The progress of a map."""

    done: int
    """Items that are done."""
    total: int
    """All items."""
    by_worker: dict[int, int]
    """Items that each rank has done."""
    lost: tuple[int, ...]
    """Workers that were lost."""


def run_map(
    call: Callable[[int, Any], RpcFuture],
    items: Sequence[Any],
    workers: Sequence[int],
    ahead: int,
    progress: Callable[[MapProgress], object] | None,
) -> list[Any]:
    """Return the results for all items, in order. `call(worker, item)` begins one."""
    results: list[Any] = [None] * len(items)
    waiting = deque(range(len(items)))
    under_way: dict[Future[Any], tuple[int, int]] = {}
    ended: SimpleQueue[Future[Any]] = SimpleQueue()
    done_by = dict.fromkeys(workers, 0)
    lost: list[int] = []

    def lose(worker: int, index: int, exc: Exception) -> None:
        waiting.appendleft(index)
        if worker not in lost:
            lost.append(worker)
        if len(lost) == len(done_by):
            raise RpcPeerLostError(worker, f"all other workers of this map are lost too ({exc})") from exc

    def fill() -> None:
        """Round by round, so that with few items every worker gets some."""
        for most in range(1, ahead + 1):
            for worker in workers:
                has = sum(1 for other, _ in under_way.values() if other == worker)
                if not waiting or worker in lost or has >= most:
                    continue
                index = waiting.popleft()
                try:
                    future = call(worker, items[index])
                except RpcNoConnectionError as exc:
                    lose(worker, index, exc)
                else:
                    under_way[future] = worker, index
                    future.add_done_callback(ended.put)

    try:
        fill()
        while under_way:
            future = ended.get()  # each ends by its own deadline
            worker, index = under_way.pop(future)
            try:
                results[index] = future.result()
            except RpcPeerLostError as exc:
                lose(worker, index, exc)
            else:
                done_by[worker] += 1
                if progress is not None:
                    progress(MapProgress(sum(done_by.values()), len(items), dict(done_by), tuple(lost)))
            fill()
    finally:
        for future in tuple(under_way):
            future.cancel()
    return results
