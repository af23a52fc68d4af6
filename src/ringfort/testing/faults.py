"""`FaultTimetable`: which rank fails how and when, in one readable table; and `FaultyBackend`, which carries it out."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from ringfort.backends.base import Backend
from ringfort.backends.group import Group, RingStep
from ringfort.backends.sub import SubBackend
from ringfort.config import whole
from ringfort.errors import InvalidArgumentError
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Reducer

if TYPE_CHECKING:
    from typing_extensions import Buffer


class FaultKind(Enum):
    """The kind of a fault."""

    KILL = "kill"
    """The rank dies at once, without a goodbye."""
    FREEZE = "freeze"
    """The rank stops, like a laptop whose lid is closed; it continues after `thaw`."""
    CUT = "cut"
    """The cable to `peer` is pulled: nothing arrives in either direction, and neither side is told."""
    ABORT = "abort"
    """The rank aborts the group."""


@dataclass(frozen=True)
class Fault:
    """`rank` fails just before its step `at`. Steps count from 1: each send, recv, exchange and barrier is one."""

    rank: int
    at: int
    kind: FaultKind
    peer: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("rank", self.rank, 0), ("at", self.at, 1)):
            if why := whole(least)(value):
                raise InvalidArgumentError(name, value, why)
        if (self.kind is FaultKind.CUT) != (self.peer is not None):
            raise InvalidArgumentError("peer", self.peer, "name the peer of a cut, and of no other fault")

    def __str__(self) -> str:
        whom = "" if self.peer is None else f", peer={self.peer}"
        return f"{self.kind.value}(rank={self.rank}, at={self.at}{whom})"


@dataclass(frozen=True)
class FaultTimetable:
    """Which rank fails how and when. Each method returns a new table with one more fault:

    FaultTimetable().kill(rank=2, at=5).freeze(rank=1, at=9)
    """

    faults: tuple[Fault, ...] = ()

    def kill(self, rank: int, at: int) -> FaultTimetable:
        """Let `rank` die before its step `at`."""
        return self._with(Fault(rank, at, FaultKind.KILL))

    def freeze(self, rank: int, at: int) -> FaultTimetable:
        """Let `rank` stop before its step `at`."""
        return self._with(Fault(rank, at, FaultKind.FREEZE))

    def cut(self, rank: int, at: int, peer: int) -> FaultTimetable:
        """Pull the cable between `rank` and `peer` before step `at` of `rank`."""
        return self._with(Fault(rank, at, FaultKind.CUT, peer))

    def abort(self, rank: int, at: int) -> FaultTimetable:
        """Let `rank` abort before its step `at`."""
        return self._with(Fault(rank, at, FaultKind.ABORT))

    def of(self, rank: int) -> list[Fault]:
        """Return the faults of one rank, soonest first."""
        return sorted((fault for fault in self.faults if fault.rank == rank), key=lambda fault: fault.at)

    @property
    def killed(self) -> frozenset[int]:
        """The ranks that are killed."""
        return frozenset(fault.rank for fault in self.faults if fault.kind is FaultKind.KILL)

    def _with(self, fault: Fault) -> FaultTimetable:
        return replace(self, faults=(*self.faults, fault))

    def __bool__(self) -> bool:
        return bool(self.faults)

    def __repr__(self) -> str:
        return ".".join(("FaultTimetable()", *map(str, self.faults)))


class RankKilled(BaseException):  # not an Exception: like SystemExit, nothing that a rank does may catch it
    """Ends the thread of a killed rank, in a group of threads."""


class FaultyBackend(Backend):
    """Any backend, with the faults of a timetable.

    In a group of threads the faults hit the backend, which then needs the methods `kill` and `cut` that
    `SimulatedBackend` has; the thread of a killed rank ends with `RankKilled`. With `is_process=True` the faults hit
    this process: it is killed by SIGKILL and frozen by SIGSTOP. To use it with sub-groups, wrap the outermost backend
    and make the sub-groups over the wrapper.
    """

    def __init__(self, backend: Backend, timetable: FaultTimetable, *, is_process: bool = False) -> None:
        """Raises `InvalidArgumentError` for a fault that `backend` does not support."""
        self.backend, self.config = backend, backend.config
        self.step = 0
        """Steps that were begun so far."""
        self._faults = timetable.of(backend.rank)
        self._is_process = is_process
        self._counter = threading.Lock()
        self._thawed = threading.Event()
        self._thawed.set()
        for fault in self._faults:
            needs_method = fault.kind is FaultKind.CUT or (fault.kind is FaultKind.KILL and not is_process)
            if needs_method and not hasattr(_outermost(backend), fault.kind.value):
                why = f"{type(_outermost(backend)).__name__} has no method {fault.kind.value}()"
                raise InvalidArgumentError("timetable", str(fault), why)
        self._group = _FaultyGroup(backend.group, self._next_step)

    @property
    def group(self) -> Group:
        return self._group

    # --- steps ----------------------------------------------------------------------------------------------------

    def _next_step(self) -> None:
        """Count a step and cause the faults that are due. A frozen rank waits here."""
        with self._counter:
            self.step += 1
            due = [fault for fault in self._faults if fault.at <= self.step]
            self._faults = self._faults[len(due) :]
        for fault in due:
            self._cause(fault)
        self._thawed.wait()

    def _cause(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.KILL:
                if self._is_process:
                    os.kill(os.getpid(), signal.SIGKILL)
                _outermost(self.backend).kill()
                raise RankKilled(str(fault))
            case FaultKind.FREEZE:
                if self._is_process:
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    self._thawed.clear()
            case FaultKind.CUT:
                assert fault.peer is not None
                _outermost(self.backend).cut(self.backend.group.members[fault.peer])
            case FaultKind.ABORT:
                self.backend.abort(f"by timetable: {fault}")

    def thaw(self) -> None:
        """Let a frozen rank of a group of threads continue. (For a frozen process, use SIGCONT.)"""
        self._thawed.set()

    def close(self) -> None:
        """Close the backend; a frozen rank thaws and finds it closed."""
        self.backend.close()
        self.thaw()

    def __repr__(self) -> str:
        left = ", ".join(map(str, self._faults)) or "no more faults"
        return f"<{type(self).__name__} of {self.backend!r} after {self.step} steps; {left}>"


class _FaultyGroup(Group):
    """The same ranks over the same links. Every message of a collective is a step, so there is no shared memory and no
    message that is passed on while it arrives."""

    def __init__(self, group: Group, next_step: Callable[[], None]) -> None:
        vars(self).update(vars(group))
        self._group, self._next_step = group, next_step
        self._parts, self.fast_plans = {}, {}
        self.shares_memory = self.is_measured = False
        self.connections = (self,)

    def send(self, data: Buffer, dst: int, envelope: Envelope) -> None:
        self._next_step()
        super().send(data, dst, envelope)

    def recv(self, into: Buffer, src: int, envelope: Envelope, reduce: Reducer | None = None) -> None:
        self._next_step()
        super().recv(into, src, envelope, reduce)

    def exchange(
        self, out: Buffer, dst: int, into: Buffer, src: int, envelope: Envelope, reduce: Reducer | None = None
    ) -> None:
        self._next_step()
        super().exchange(out, dst, into, src, envelope, reduce)

    def pipelined_ring(self, steps: Sequence[RingStep], dst: int, src: int, envelope: Envelope) -> None:
        for step in steps:
            self.exchange(step.out, dst, step.into, src, envelope, step.reduce)

    def swap(self, data: bytes | memoryview, into: memoryview, peer: int, envelope: Envelope) -> None:
        self.exchange(data, peer, into, peer, envelope)

    def barrier(self, timeout: float | None = None) -> None:
        self._next_step()
        self._group.barrier(timeout)


def _outermost(backend: Any) -> Any:
    """The backend that has the links, and the methods that break them."""
    while isinstance(backend, SubBackend):
        backend = backend.parent
    return backend
