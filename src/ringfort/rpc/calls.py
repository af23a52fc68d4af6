"""Calls from this rank that have not ended. Each ends exactly once: whoever takes it from the table ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from itertools import count
from typing import Any

from ringfort.errors import RpcError, RpcOverloadedError, RpcTimeoutError
from ringfort.rpc.outbound import Outgoing
from ringfort.transport.locks import Future


class RpcFuture(Future[Any]):
    """What a call will return. It can be waited for, awaited and given up: then the other rank stops working on it."""

    def __init__(self, give_up: Callable[[], bool], peer: int, deadline: float) -> None:
        super().__init__()
        self.peer = peer
        """The rank that was called."""
        self.deadline = deadline
        """When it ends at the latest, on `time.monotonic`'s clock."""
        self.outgoing: Outgoing | None = None
        self._give_up = give_up

    @property
    def is_sent(self) -> bool:
        """All of the request has left."""
        return self.outgoing is not None and self.outgoing.is_over

    def cancel(self) -> bool:
        """Gives the call up. False if it has ended."""
        if self._give_up():
            super().cancel()
            self.set_running_or_notify_cancel()
        return self.cancelled()

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # 40 ms that programs without it need not spend

        return asyncio.wrap_future(self).__await__()


class Call:
    """One call under way."""

    __slots__ = ("deadline", "future", "number", "outgoing", "peer", "timeout", "what")

    def __init__(self, number: int, what: str, timeout: float, future: RpcFuture) -> None:
        self.number = number
        self.peer = future.peer
        self.what = what
        self.timeout = timeout
        self.deadline = future.deadline
        self.future = future
        self.outgoing: Outgoing | None = None
        """Once it has ended: its request, of which not all may have left."""


class Calls:
    """The table."""

    def __init__(self, max_in_flight: int, cancel: Callable[[Call], None]) -> None:
        """`cancel` tells the other side that a call was given up."""
        self._numbers = count(1)
        self._calls: dict[int, Call] = {}
        self._in_flight: dict[int, int] = {}
        self._max_in_flight = max_in_flight
        self._cancel = cancel
        self._lock = threading.Lock()
        self._soonest = float("inf")  # no call ends earlier by its deadline

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, peer: int, what: str, timeout: float) -> Call:
        """A new call. Raises `RpcOverloadedError`."""
        number = next(self._numbers)
        future = RpcFuture(lambda: self._give_up(number), peer, time.monotonic() + timeout)
        call = Call(number, what, timeout, future)
        with self._lock:
            have = self._in_flight.get(peer, 0)
            if have >= self._max_in_flight:
                raise RpcOverloadedError(
                    f"{have} calls to rank {peer} have not ended, which is max_in_flight; wait for some of them",
                    peer=peer,
                )
            self._in_flight[peer] = have + 1
            self._calls[number] = call
            self._soonest = min(self._soonest, call.deadline)
        return call

    def take(self, number: int, peer: int | None = None) -> Call | None:
        """The call, which is whoever's took it to end; None if it has ended, or was not made to `peer`."""
        with self._lock:
            call = self._calls.get(number)
            if call is None or (peer is not None and call.peer != peer):
                return None
            del self._calls[number]
            self._in_flight[call.peer] -= 1
        # Whoever keeps the future must not keep the arguments.
        call.outgoing, call.future.outgoing = call.future.outgoing, None
        return call

    def get(self, number: int) -> Call | None:
        """The call, if it has not ended."""
        return self._calls.get(number)

    def _give_up(self, number: int) -> bool:
        call = self.take(number)
        if call is None:
            return False
        self._cancel(call)
        return True

    def expire(self, now: float) -> float | None:
        """Ends calls whose time is over; when to look again. Most calls end before, so most often nothing is done."""
        with self._lock:
            if now < self._soonest:
                return None if self._soonest == float("inf") else self._soonest
            calls = list(self._calls.values())
            self._soonest = min((call.deadline for call in calls if call.deadline > now), default=float("inf"))
            soonest = self._soonest
        for call in calls:
            if call.deadline <= now and self.take(call.number) is not None:
                self._cancel(call)
                call.future.set_exception(RpcTimeoutError(call.what, call.timeout, peer=call.peer))
        return None if soonest == float("inf") else soonest

    def fail(self, peer: int | None, error: Callable[[Call], RpcError]) -> None:
        """Ends all calls to `peer`, or to anybody."""
        with self._lock:
            numbers = [call.number for call in self._calls.values() if peer in (None, call.peer)]
        for number in numbers:
            call = self.take(number)
            if call is not None:
                if call.outgoing is not None:
                    call.outgoing.withdrawn = True
                call.future.set_exception(error(call))
