"""`ControlClient`: sends the requests of a node to its control service.

One thread does all I/O and answers pings: a write in the caller's thread could be interrupted halfway by Ctrl-C. A
second thread runs the program's callbacks, which may be slow and may send requests themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.events import ClusterEvent, ControlLost
from ringfort.cluster.core.peer_messages import RunState
from ringfort.cluster.net import ipc
from ringfort.cluster.net.ipc_connection import IpcConnection
from ringfort.errors import ControlLostError, DistributedError
from ringfort.transport.forks import keep_from_children
from ringfort.transport.locks import Future, Thread

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Stream(NamedTuple):
    """A stream that a peer has opened."""

    peer: str
    purpose: str
    connection: Connection


@dataclass
class _Pending:
    answer: Future[msgspec.Raw] = field(default_factory=Future["msgspec.Raw"])
    connections: dict[int, Connection] = field(default_factory=dict[int, Connection])


def _fail(pending: _Pending, failure: DistributedError) -> None:
    with suppress(InvalidStateError):  # it is answered already
        pending.answer.set_exception(failure)


@dataclass(eq=False)
class ControlClient:
    """All methods are thread-safe."""

    sock: socket.socket
    on_change: Callable[[ipc.State | ClusterEvent], None]
    """Called in a thread of its own with every state and every event, in order."""
    on_end: Callable[[], DistributedError]
    """Called when the service has closed the connection. It returns the error for pending requests."""
    work_done: Callable[[], int]
    steps_done: Callable[[], int]
    """Called several times a second, as `work_done` is."""
    own_trace: Callable[[], str]
    """The same. Returns where this process writes down its steps; empty if it does not."""
    on_stream: Callable[[str, str, Connection], None]
    """Called in the thread of `on_change`, with a peer, a purpose and a stream that it takes over."""
    on_fence: Callable[[int, tuple[str, ...]], RunState]
    """Called in the same thread for the program of an elastic run (`ipc.Fence`)."""
    is_forked: bool = False
    """This process is a forked child of the one that the client belongs to."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _pending: dict[int, _Pending] = field(default_factory=dict[int, _Pending])
    _failure: DistributedError | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        self._changes: queue.SimpleQueue[ipc.State | ipc.Fence | ClusterEvent | _Stream | None] = queue.SimpleQueue()
        self._connection = IpcConnection(self.sock, ipc.decode_for_node, self._on_message, self._finish)
        keep_from_children(self)
        self._threads = [Thread(self._run, name="ringfort-node"), Thread(self._dispatch, name="ringfort-events")]
        for thread in self._threads:
            thread.start()

    # --- requests ---------------------------------------------------------------------------------------------------

    def ask(self, request: ipc.AnyRequest, kind: type[T], timeout: float) -> T:
        """Return the answer to `request`. Raise what the service raised, `ControlLostError` if it does not answer, or
        the error that `on_end` returned if the service has ended."""
        return msgspec.msgpack.decode(self._request(request, timeout).answer.result(0), type=kind)

    def connect(self, request: ipc.Connect | ipc.OpenStream, timeout: float) -> dict[int, Connection]:
        """Return a connection to each member, by rank; for a stream, one at 0. Raise as `ask` does."""
        return self._request(request, timeout).connections

    def _request(self, request: ipc.AnyRequest, timeout: float) -> _Pending:
        """Send a request and return its answer and connections. Cancel it if that fails."""
        number, pending = next(self._numbers), _Pending()
        self._pending[number] = pending
        self.post(ipc.Ask(number, request, self.work_done()))
        if self._failure is not None:  # the service ended before it saw the request
            _fail(pending, self._failure)
        try:
            if not pending.answer.is_done_within(timeout):
                raise ControlLostError(f"the control service has not answered for {timeout:g} s")
            pending.answer.result(0)
            return pending
        except BaseException:
            self.post(ipc.Cancel(number))
            for connection in pending.connections.values():
                connection.close()
            raise
        finally:
            self._pending.pop(number, None)

    def post(self, message: ipc.ToService) -> None:
        """Send a message without waiting for an answer."""
        with suppress(RuntimeError):  # the loop is closed: the service has ended
            self._loop.call_soon_threadsafe(self._connection.send, message)

    def join(self, seconds: float) -> bool:
        """Return whether both threads have ended within about `seconds`. May be called in either thread."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    # --- the I/O thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.call_soon(self._connection.start)
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _on_message(self, message: ipc.ToNode) -> None:
        match message:
            case ipc.Ping():
                self._connection.send(ipc.Pong(self.work_done(), self._steps(), self.own_trace()))
            case ipc.Answer(number=number, value=value):
                self._pending.get(number, _Pending()).answer.set_result(value)
            case ipc.Failed(number=number):
                self._pending.get(number, _Pending()).answer.set_exception(ipc.error_of(message))
            case ipc.Connected(number=number, rank=rank, session=session):
                connection = Connection.resume(self._connection.take_socket(), session)
                pending = self._pending.get(number)
                if pending is None:
                    connection.close()
                else:
                    pending.connections[rank] = connection
            case ipc.Streamed(peer=peer, purpose=purpose, session=session):
                connection = Connection.resume(keep_from_children(self._connection.take_socket()), session)
                self._changes.put(_Stream(peer, purpose, connection))
            case ipc.Logged(logger=name, level=level, text=text):
                logging.getLogger(name).log(level, "%s", text)
            case ipc.State() | ipc.Fence():
                self._changes.put(message)
            case ipc.Happened():
                self._changes.put(ipc.event_of(message))

    def _steps(self) -> int:
        try:
            return self.steps_done()
        except Exception:
            _log.exception("steps_done() failed")
            return 0

    def _finish(self) -> None:
        """Fail all pending requests: the service has ended."""
        self._connection.close()
        failure = self._failure = self.on_end()
        if isinstance(failure, ControlLostError):
            self._changes.put(ControlLost(str(failure)))
        for pending in tuple(self._pending.values()):
            _fail(pending, failure)
        self._changes.put(None)
        self._loop.stop()

    # --- the callback thread ----------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while (change := self._changes.get()) is not None:
            if isinstance(change, _Stream):
                self.post(ipc.StreamTaken())
                self.on_stream(*change)
            elif isinstance(change, ipc.Fence):
                self.post(ipc.Fenced(change.epoch, self.on_fence(change.epoch, change.ended)))
            else:
                self.on_change(change)

    # --- forked children --------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Close this process's copy of the socket. Called in a forked child, which has none of the threads."""
        self.is_forked = True
        with suppress(OSError):
            os.close(self.sock.detach())
