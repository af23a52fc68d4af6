"""Which micro-batches are loaded ahead, which are kept and which are dropped. Pure.

A DataLoader is a queue: it asks for a request whenever it can take one, and returns the batches in that order. It
cannot be told that a request is no longer wanted, nor that there is none now; so it gets None for "nothing to load",
and what comes back unwanted is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Request(NamedTuple):
    """One micro-batch that this machine computes."""

    step: int
    part: int
    indices: tuple[int, ...]
    """Its samples. With them a request differs from one of the same step in another branch of the run."""
    seed: int
    """64 bits for its randomness: `random_key(seed of the run, step, part)`."""


class PrefetchPlan(Generic[T]):
    """The requests that a DataLoader works on, and the batches that came early.

    The wanted requests are the current one and up to `depth` that follow it. At most `depth` batches are kept, and at
    most `depth` more are in the queue.
    """

    def __init__(self, depth: int) -> None:
        """`depth` is the length of the DataLoader's queue; 0 if it loads in this process, when it is asked."""
        self._depth = depth
        self._wanted: dict[Request, None] = {}
        self._queue: deque[Request | None] = deque()
        self._head = 0
        self._kept: dict[Request, T] = {}

    @property
    def head(self) -> int:
        """The number of the request that comes back next."""
        return self._head

    @property
    def in_flight(self) -> int:
        """The number of requests that were handed out and have not come back."""
        return len(self._queue)

    def want(self, current: Request, upcoming: Iterable[Request]) -> None:
        """The program waits for `current`, and `upcoming` follow as far as they are known. They replace what was wanted
        before; batches of others are dropped."""
        self._wanted = {current: None}
        for request in upcoming:
            if len(self._wanted) > self._depth:
                break
            self._wanted[request] = None
        self._kept = {request: batch for request, batch in self._kept.items() if request in self._wanted}

    def hand_out(self) -> tuple[int, Request | None]:
        """Return the next request for the DataLoader, with its number; None if there is nothing to load."""
        request = self._next()
        self._queue.append(request)
        return self._head + len(self._queue) - 1, request

    def receive(self, batch: T) -> Request | None:
        """The oldest request has come back. Return it. Its batch is kept if it is wanted."""
        request = self._queue.popleft()
        self._head += 1
        if request is not None and request in self._wanted:
            self._kept[request] = batch
        return request

    def has(self, request: Request) -> bool:
        """Whether the batch of `request` is here."""
        return request in self._kept

    def take(self, request: Request) -> T:
        """Return the batch of `request`, which is here. It is no longer wanted."""
        self._wanted.pop(request, None)
        return self._kept.pop(request)

    def is_idle(self) -> bool:
        """Whether nothing is loading at the head of the queue although there is something to load: it is worth
        receiving, which takes no time then and makes room for it."""
        return bool(self._queue) and self._queue[0] is None and self._next() is not None

    def restart(self) -> None:
        """The DataLoader is gone. What it worked on must be handed out again."""
        self._head += len(self._queue)
        self._queue.clear()

    def _next(self) -> Request | None:
        for request in self._wanted:
            if request not in self._kept and request not in self._queue:
                return request
        return None
