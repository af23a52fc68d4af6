"""`run`: a function on several workers of Dask, as the ranks of one group.

    results = ringfort.integrations.dask.run(client, train, epochs=3)

Dask starts the ranks and returns what they return; arrays travel over links of Ringfort, which are encrypted.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from ringfort.backends.tcp import TcpBackend
from ringfort.config import DistributedConfig, check_timeout, format_address, parse_address
from ringfort.context import DistributedContext
from ringfort.errors import DistributedError, InvalidArgumentError
from ringfort.integrations.versions import require
from ringfort.transport import tcp

require("distributed", "2024.1")

distributed: Any = import_module("distributed")

LOOK_SECONDS: Final = 0.5
"""Seconds between two looks whether all workers are still there."""
OTHERS_SECONDS: Final = 5.0
"""Seconds that the other ranks have to end by themselves after one has failed, before they are aborted."""

_listeners: dict[str, socket.socket] = {}
"""At the worker of rank 0: where the ranks of a run meet, by the name of the run."""
_contexts: dict[str, DistributedContext] = {}
"""At every worker: the rank of a run, by the name of the run."""


class DaskRunError(DistributedError):
    """Ranks of `run` failed, and all others were stopped.

    `rank` is the first that failed by itself, and its exception is the cause. `errors` has the exceptions of all ranks
    that raised one, by rank, and `results` what the others returned.
    """

    is_peer_failure = True

    def __init__(self, rank: int, errors: dict[int, BaseException], results: dict[int, Any]) -> None:
        error = errors[rank]
        super().__init__(f"Rank {rank} failed: {type(error).__name__}: {error}", peer=rank)
        self.rank = rank
        self.errors = errors
        self.results = results


class WorkerLostError(DistributedError):
    """The Dask worker of a rank has ended. Its own log says why."""

    is_peer_failure = True

    def __init__(self, rank: int, address: str) -> None:
        super().__init__(f"The worker of rank {rank}, {address}, is gone; its own log says why", peer=rank)


def run(
    client: Any,
    fn: Callable[..., Any],
    /,
    *args: Any,
    workers: Sequence[str] | int | None = None,
    timeout: float | None = None,
    **keywords: Any,
) -> list[Any]:
    """Call `fn(ctx, *args, **keywords)` on workers of `client`, one rank per worker, and return what the ranks return.

    `workers` are their addresses, in the order of the ranks, or how many to take; all of them by default. `timeout` is
    that of `ringfort.init`: seconds for forming the group and for every call. The machines of the workers must belong
    to one cluster (`ringfort key join`). No rank is started twice: a worker that dies ends the run. Ctrl-C ends it too.

    Raises:
        DaskRunError: A rank raised an exception, or its worker has ended.
        InvalidArgumentError: There are no such workers, or the client is asynchronous.

    Example:
        >>> with Client(n_workers=3, threads_per_worker=1) as client:
        ...     run(client, lambda ctx: ctx.rank)
        [0, 1, 2]
    """
    if client.asynchronous:
        raise InvalidArgumentError("client", "asynchronous", "must be a plain client: Any(..., asynchronous=False)")
    if timeout is not None:
        check_timeout(timeout)
    chosen = _choose(_alive(client), workers)
    name = f"ringfort-{secrets.token_hex(4)}"
    master = client.run(_open, name, workers=[chosen[0]])[chosen[0]]
    futures = [
        client.submit(
            _run_rank, name, fn, rank, len(chosen), master, timeout, args, keywords,
            key=f"{name}-rank-{rank}", workers=[worker], allow_other_workers=False, pure=False, retries=0,
        )
        for rank, worker in enumerate(chosen)
    ]  # fmt: skip
    is_over = False
    try:
        results = _Watch(client, name, chosen, futures).until_end()
        is_over = True
    finally:
        if not is_over:
            _stop(client, name, chosen, futures)
    return results


def _choose(alive: Sequence[str], workers: Sequence[str] | int | None) -> list[str]:
    """Return the workers of a run, by rank."""
    count = len(alive) if workers is None else workers if isinstance(workers, int) else None
    chosen = sorted(alive)[:count] if workers is None or isinstance(workers, int) else list(workers)
    there = f"there are {len(alive)}: {', '.join(sorted(alive)) or 'start some'}"
    if not chosen or (count is not None and not 1 <= count <= len(alive)):
        raise InvalidArgumentError("workers", workers, f"must be a number of the workers that Dask has; {there}")
    if unknown := [worker for worker in chosen if worker not in alive]:
        raise InvalidArgumentError("workers", unknown[0], f"not a worker of this client; {there}")
    if len(set(chosen)) != len(chosen):
        raise InvalidArgumentError("workers", workers, "must name each worker once: each is one rank")
    return chosen


def _alive(client: Any) -> list[str]:
    return client.run_on_scheduler(_worker_addresses)


def _worker_addresses(dask_scheduler: Any = None) -> list[str]:
    """Run by the scheduler."""
    return list(dask_scheduler.workers)


class _Watch:
    """The ranks of a run while they work."""

    def __init__(self, client: Any, name: str, workers: Sequence[str], futures: Sequence[Any]) -> None:
        self._client, self._name = client, name
        self._workers, self._futures = workers, futures
        self._errors: dict[int, BaseException] = {}
        self._results: dict[int, Any] = {}
        self._first: int | None = None
        """The first rank that has failed by itself, or else because of another."""

    def until_end(self) -> list[Any]:
        """Return the results of all ranks. Raises `DaskRunError`."""
        give_up = None
        while self._open:
            with suppress(TimeoutError):
                waiting = [self._futures[rank] for rank in self._open]
                distributed.wait(waiting, timeout=LOOK_SECONDS, return_when="FIRST_COMPLETED")
            self._look()
            if self._errors and give_up is None:
                give_up = time.monotonic() + OTHERS_SECONDS
            if give_up is not None and time.monotonic() > give_up:
                break
        if self._errors:
            first = self._cause()
            raise DaskRunError(first, self._errors, self._results) from self._errors[first]
        return [self._results[rank] for rank in range(len(self._workers))]

    @property
    def _open(self) -> list[int]:
        """The ranks that have not ended."""
        ranks = range(len(self._workers))
        return [rank for rank in ranks if rank not in self._errors and rank not in self._results]

    def _look(self) -> None:
        """Take up how ranks have ended."""
        alive = set(_alive(self._client))
        for rank in self._open:
            future = self._futures[rank]
            if future.status == "finished":
                self._results[rank] = future.result()
            elif self._workers[rank] not in alive:  # Dask would wait for it, for ever
                self._errors[rank] = WorkerLostError(rank, self._workers[rank])
            elif future.status == "error":
                error = future.exception()
                assert error is not None
                self._errors[rank] = error
            elif future.status in ("cancelled", "lost"):
                self._errors[rank] = DistributedError(f"The task of rank {rank} was cancelled", peer=rank)

    def _cause(self) -> int:
        """Return the rank that has failed first: others have lost it, or were aborted."""

        def follows(rank: int) -> bool:
            error = self._errors[rank]
            if isinstance(error, WorkerLostError) or not isinstance(error, DistributedError):
                return False
            return error.is_peer_failure or error.is_fatal

        return min(self._errors, key=lambda rank: (follows(rank), rank))


def _stop(client: Any, name: str, workers: Sequence[str], futures: Sequence[Any]) -> None:
    """End the ranks that still run: Dask cannot interrupt a function, but a group can be aborted."""
    alive = set(_alive(client))
    client.run(_abort, name, workers=[worker for worker in workers if worker in alive], on_error="ignore")
    client.cancel(list(futures), force=True)


# --- at the workers ---------------------------------------------------------------------------------------------------


def _open(name: str, dask_worker: Any = None) -> str:
    """Open the place where the ranks meet, at the address of this worker, which the others reach. Return it."""
    host, _ = parse_address(dask_worker.address.partition("://")[2])
    listener = _listeners[name] = tcp.listen(host, 0)
    return format_address(host, listener.getsockname()[1])


def _run_rank(
    name: str,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    master: str,
    timeout: float | None,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    config = DistributedConfig() if timeout is None else DistributedConfig(timeout=timeout)
    listener = _listeners.pop(name, None)
    backend = TcpBackend(rank, world_size, master, config=config, listener=listener, group=f"the Dask run {name}")
    with DistributedContext(backend).show() as context:
        _contexts[name] = context
        try:
            return fn(context, *args, **keywords)
        finally:
            del _contexts[name]


def _abort(name: str) -> None:
    """Run beside the rank, which may wait for another one."""
    context, listener = _contexts.get(name), _listeners.pop(name, None)
    if listener is not None:
        listener.close()
    if context is not None:
        context.backend.abort("the Dask run was stopped")
