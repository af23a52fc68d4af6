"""`Native`: the collectives of another engine (Gloo's, MPI's, NCCL's), with the rules of ours.

Another engine knows nothing of ranks that disagree, and few of them of peers that die. So the ranks first meet over
their links, in messages that say what each has called: whoever gets through knows that all are in the same collective.
Then the engine does it, and this rank waits for it as for a peer: deaths, aborts and timeouts end the wait.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ringfort.errors import OperationTimeoutError, TransportError
from ringfort.transport.links import Link
from ringfort.transport.messages import Envelope

if TYPE_CHECKING:
    from ringfort.backends.group import Group

_LAST_BYTES = 2.0
"""Seconds for the engine's last bytes, where the peer that is watched has done its part and said goodbye."""
_PAUSE = 0.02
"""Seconds between two looks at an engine that does not tell when it has ended."""
_BLAME = 1.0
"""Seconds for the links to tell which peer it was, once the engine has failed: they know within a moment."""


class ByHost(NamedTuple):
    """Collectives that go host by host: the engine inside each host, our links between the hosts."""

    local: Group
    """The ranks of this host."""
    between: Group | None
    """The first ranks of all hosts, where this is one of them."""


class Pending(NamedTuple):
    """A collective that the engine has begun."""

    is_done: Callable[[], bool]
    """Whether it has ended; raises what it has failed with."""
    memory: object
    """What the engine may write to until it has ended."""


class _Wait:
    """Whether something pending is over: has ended, or has failed and the links had the time to tell why."""

    def __init__(self, pending: Pending, link: Link | None, wake: Callable[[], None]) -> None:
        self._pending, self._link, self._wake = pending, link, wake
        self.failure: Exception | None = None
        self._give_up = 0.0

    def is_over(self) -> bool:
        if self.failure is not None:
            return time.monotonic() > self._give_up
        try:
            return self._pending.is_done() or (
                self._link is not None and self._link.goodbye is not None and self._ends_soon()
            )
        except Exception as exc:
            self.failure = exc
            self._give_up = time.monotonic() + _BLAME
            timer = threading.Timer(_BLAME + 0.01, self._wake)
            timer.daemon = True
            timer.start()
            return False

    def _ends_soon(self) -> bool:
        until = time.monotonic() + _LAST_BYTES
        while time.monotonic() < until:
            if self._pending.is_done():
                return True
            time.sleep(0.001)
        return False


class Native(ABC):
    """One group's collectives in another engine. Arrays are flat and contiguous; `op` is a name of `ReduceOp`'s."""

    name: str
    """What people call the engine."""
    collectives: frozenset[str]
    """Those that it has."""
    sums: frozenset[str]
    """Element types that it can add and multiply, as we do to the bit."""
    orders: frozenset[str]
    """Element types of which it can find the least and the greatest: not floats, whose NaNs engines drop by chance."""
    tensors_on: str = ""
    """The device of torch's tensors that it takes as they are; without one it takes arrays of NumPy's."""
    by_host: ByHost | None = None
    """Set where the engine works inside each host only."""
    eager: float = 0.0
    """Seconds in which it is asked without a pause whether it has ended, where it does not tell by itself."""

    def __init__(self, group: Group, wake: Callable[[], None]) -> None:
        """`wake` has the engine of the links look again."""
        self._group = group
        self._wake = wake
        self._failed: list[Pending] = []

    @property
    def is_stuck(self) -> bool:
        """Whether something was begun that has never ended."""
        return bool(self._failed)

    def takes(self, collective: str, kind: str, op: str = "") -> bool:
        """Whether the engine can do this, with the result that ours would have. `kind` names the element type."""
        if collective not in self.collectives:
            return False
        return (
            not op or (op in ("SUM", "PRODUCT") and kind in self.sums) or (op in ("MIN", "MAX") and kind in self.orders)
        )

    def run(self, begin: Callable[[], Pending], envelope: Envelope) -> None:
        """Do what `begin` begins, once all ranks are in the collective of `envelope`. Raises as collectives do."""
        self._group.meet(envelope)
        self.carry(begin, envelope)

    def carry(self, begin: Callable[[], Pending], envelope: Envelope) -> None:
        """`run` where the ranks have met already."""
        try:
            pending = begin()
        except Exception as exc:
            raise self._failure(exc) from exc
        try:
            self._wait(pending, envelope)
        except BaseException:
            # The engine may still write to the memory: it must not be given to somebody else.
            self._failed.append(pending)
            self.abandon()
            raise

    def _wait(self, pending: Pending, envelope: Envelope) -> None:
        peer = (self._group.rank + 1) % self._group.world_size
        link = self._group.engine.links.get(self._group.members[peer])
        wait = _Wait(pending, link, self._wake)
        until = time.monotonic() + (self.eager if link is not None else envelope.timeout)
        while not wait.is_over():
            if time.monotonic() < until:
                os.sched_yield()
            elif link is None:
                raise OperationTimeoutError(f"waiting for a collective of {self.name}", envelope.timeout)
            else:
                pause = time.monotonic() + _PAUSE if self.eager else float("inf")
                self._group.engine.watch(lambda: wait.is_over() or time.monotonic() > pause, link.peer, envelope)  # noqa: B023
        if wait.failure is not None:
            raise self._failure(wait.failure) from wait.failure

    def _failure(self, exc: Exception) -> TransportError:
        """Tell the other ranks, which may not know, and return the error."""
        words = f"{self.name} failed: {str(exc).strip() or type(exc).__name__}"
        self._group.engine.abort(words)
        return TransportError(words)

    @abstractmethod
    def abandon(self) -> None:
        """Make the engine release the memory of what has failed, if it can. The engine is not used again."""

    # --- what an engine does ---------------------------------------------------------------------------------------

    @abstractmethod
    def all_reduce(self, x: Any, op: str) -> Pending:
        """Reduce every rank's `x` in place."""

    def reduce(self, x: Any, root: int, op: str) -> Pending:
        """Reduce into the root's `x`; the `x` of the others is undefined afterwards."""
        raise NotImplementedError

    @abstractmethod
    def broadcast(self, x: Any, root: int) -> Pending:
        """Copy the root's `x` to every rank's `x`."""

    @abstractmethod
    def all_gather(self, x: Any, into: Any) -> Pending:
        """Gather the `x` of all ranks in `into`, one after the other."""

    def reduce_scatter(self, x: Any, into: Any, op: str) -> Pending:
        """Reduce this rank's parts of all `x` into `into`."""
        raise NotImplementedError

    def all_to_all(self, x: Any, into: Any) -> Pending:
        """Exchange parts: part i of rank j's `x` becomes part j of rank i's `into`."""
        raise NotImplementedError
