"""The calls from this rank that have not ended. Each ends exactly once: whoever takes it out of the table ends it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from itertools import count
from typing import Any

from ringfort.errors import RpcOverloadedError, RpcPeerLostError, RpcTimeoutError
from ringfort.rpc.outbound import Outgoing
from ringfort.transport.locks import Future


class RpcFuture(Future[Any]):
    """The future result of a call. It can be waited for, awaited and cancelled; cancelling stops the remote work."""

    def __init__(self, number: int, peer: int, what: str, timeout: float, give_up: Callable[[RpcFuture], bool]) -> None:
        super().__init__()
        self.number = number
        self.peer = peer
        """The rank that was called."""
        self.what = what
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        """When the call ends at the latest, on the clock of `time.monotonic`."""
        self.outgoing: Outgoing | None = None
        """The request, until the call has ended: whoever keeps the future must not keep the arguments."""
        self.references: list[object] = []
        """Those in the response, while it arrives."""
        self._give_up = give_up

    @property
    def is_sent(self) -> bool:
        """Whether the whole request has been sent and the call has not ended."""
        return self.outgoing is not None and self.outgoing.is_over

    def cancel(self) -> bool:
        """Give the call up. Return False if it has ended already."""
        if self._give_up(self):
            super().cancel()
            self.set_running_or_notify_cancel()
        return self.cancelled()

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # takes 40 ms, which programs without it need not spend

        return asyncio.wrap_future(self).__await__()


class Calls:
    """The table of calls."""

    def __init__(self, max_in_flight: int, cancel: Callable[[RpcFuture], None]) -> None:
        """`cancel` tells the other side that a call was given up."""
        self._numbers = count(1)
        self._calls: dict[int, RpcFuture] = {}
        self._in_flight: Counter[int] = Counter()
        self._max_in_flight = max_in_flight
        self._cancel = cancel
        self._lock = threading.Lock()
        self._soonest = float("inf")  # no deadline is earlier

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, peer: int, what: str, timeout: float) -> RpcFuture:
        """Add a call. Raises `RpcOverloadedError`."""
        call = RpcFuture(next(self._numbers), peer, what, timeout, self._give_up)
        with self._lock:
            in_flight = self._in_flight[peer]
            if in_flight >= self._max_in_flight:
                why = f"Too many calls to rank {peer} in flight (max_in_flight={in_flight})"
                raise RpcOverloadedError(f"{why}; wait until some have ended", peer=peer)
            self._in_flight[peer] += 1
            self._calls[call.number] = call
            self._soonest = min(self._soonest, call.deadline)
        return call

    def get(self, number: int, peer: int) -> RpcFuture | None:
        """Return the call to `peer` with this number, if it has not ended."""
        call = self._calls.get(number)
        return call if call is not None and call.peer == peer else None

    def take(self, call: RpcFuture) -> bool:
        """Remove a call and withdraw its request. Return False if somebody else has; only the caller of the `take` that
        returned True may end the call."""
        with self._lock:
            if self._calls.pop(call.number, None) is None:
                return False
            self._in_flight[call.peer] -= 1
        outgoing, call.outgoing, call.references = call.outgoing, None, []
        if outgoing is not None:
            outgoing.withdrawn = True
        return True

    def _give_up(self, call: RpcFuture) -> bool:
        is_taken = self.take(call)
        if is_taken:
            self._cancel(call)
        return is_taken

    def expire(self, now: float) -> float:
        """End the calls whose deadline has passed, and return when to look again. Most calls end before their deadline,
        so usually there is nothing to do."""
        with self._lock:
            if now < self._soonest:
                return self._soonest
            calls = list(self._calls.values())
            soonest = self._soonest = min(
                (call.deadline for call in calls if call.deadline > now), default=float("inf")
            )
        for call in calls:
            if call.deadline <= now and self._give_up(call):
                call.set_exception(RpcTimeoutError(call.what, call.timeout, peer=call.peer))
        return soonest

    def fail(self, peer: int | None, reason: str) -> None:
        """End all calls to `peer`, or to every rank if it is None, with `RpcPeerLostError`."""
        with self._lock:
            calls = [call for call in self._calls.values() if peer in (None, call.peer)]
        for call in calls:
            if self.take(call):
                call.set_exception(RpcPeerLostError(call.peer, f"{reason} ({call.what} had not ended)"))
