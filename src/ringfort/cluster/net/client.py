"""`ControlClient`: a node's end of the socket to its control service.

One thread moves all bytes, because a write that Ctrl-C interrupts halfway would put the socket out of step, and answers
pings. A second one runs the program's callbacks, which may be slow and may ask the service in turn.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.events import ClusterEvent, ControlLost
from ringfort.cluster.net import ipc
from ringfort.errors import ControlLostError, DistributedError
from ringfort.transport.finalisers import when_gone
from ringfort.transport.forks import keep_from_children
from ringfort.transport.locks import Future, Thread

_log = logging.getLogger(__name__)

T = TypeVar("T")

_READ: Final = 1 << 16
_MAX_DESCRIPTORS: Final = 64
"""That one read may bring. Each message brings at most one, and reads end at it; other systems may join some."""
_CLOEXEC: Final[int] = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@dataclass
class _Pending:
    answer: Future[msgspec.Raw] = field(default_factory=Future["msgspec.Raw"])
    connections: dict[int, Connection] = field(default_factory=dict[int, Connection])


class ControlClient:
    """All methods may be called from any thread."""

    def __init__(
        self,
        sock: socket.socket,
        on_change: Callable[[ipc.State | ClusterEvent], None],
        on_end: Callable[[], DistributedError],
        work_done: Callable[[], int],
        steps_done: Callable[[], int],
    ) -> None:
        """`on_change` is called in a thread of its own with every change of state and every event, in order. `on_end`
        is called when the service has closed the connection, and says why. `work_done` and `steps_done` are asked
        several times a second."""
        self._sock = sock
        self._on_change = on_change
        self._on_end = on_end
        self._work_done, self._steps_done = work_done, steps_done
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._frames = ipc.Frames()
        self._descriptors: deque[int] = deque()
        self._outgoing: deque[memoryview] = deque()
        self._changes: queue.SimpleQueue[ipc.State | ClusterEvent | None] = queue.SimpleQueue()
        self._failure: DistributedError | None = None
        self.is_forked = False
        """This is a child of the process that the client belongs to; it must leave it alone."""
        self._wake_reader, self._wake_writer = os.pipe()
        for descriptor in (self._wake_reader, self._wake_writer):
            os.set_blocking(descriptor, False)
        # Not before nobody can ask any more: a late question must not write to a descriptor of somebody else.
        when_gone(self, partial(_close, self._wake_reader, self._wake_writer))
        sock.setblocking(False)
        keep_from_children(self)
        self._threads = [Thread(self._move, name="ringfort-node"), Thread(self._dispatch, name="ringfort-events")]
        for thread in self._threads:
            thread.start()

    def _steps(self) -> int:
        try:
            return self._steps_done()
        except Exception:
            _log.exception("the steps that were done cannot be told")
            return 0

    # --- asking -----------------------------------------------------------------------------------------------------

    def ask(self, request: ipc.AnyRequest, kind: type[T], timeout: float) -> T:
        """The answer to `request`. Raises what the service raises, `ControlLostError` if it does not answer, or what
        `on_end` gave once the service has ended."""
        number, pending = self._begin(request)
        try:
            return ipc.decode_value(_answer(pending, timeout), kind)
        finally:
            self._pending.pop(number, None)

    def form(self, request: ipc.Form, timeout: float) -> dict[int, Connection]:
        """As `ask`, for connections: gives a connection to each member."""
        number, pending = self._begin(request)
        is_done = False
        try:
            _answer(pending, timeout)
            is_done = True
            return pending.connections
        finally:
            self._pending.pop(number, None)
            if not is_done:
                self._post(ipc.Cancel(number))
                for connection in pending.connections.values():
                    connection.close()

    def tell(self, request: ipc.AnyRequest) -> None:
        """Sends a request whose answer nobody waits for."""
        self._post(ipc.Ask(next(self._numbers), request, self._work_done()))

    def _begin(self, request: ipc.AnyRequest) -> tuple[int, _Pending]:
        number, pending = next(self._numbers), _Pending()
        self._pending[number] = pending
        self._post(ipc.Ask(number, request, self._work_done()))
        if self._failure is not None and not pending.answer.done():  # it ended before it saw this one
            with suppress(Exception):
                pending.answer.set_exception(self._failure)
        return number, pending

    def _post(self, message: ipc.ToService) -> None:
        self._outgoing.append(memoryview(ipc.frame(message)))
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full: it is awake
            os.write(self._wake_writer, b"w")

    def join(self, seconds: float) -> bool:
        """Whether both threads have ended within about `seconds`. The thread of a callback does not wait for itself."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    # --- the thread that moves bytes ----------------------------------------------------------------------------------

    def _move(self) -> None:
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)
        try:
            while True:
                poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
                for descriptor, _ in poll.poll():
                    if descriptor == self._wake_reader:
                        with suppress(BlockingIOError):
                            os.read(self._wake_reader, 4096)
                self._write()
                if not self._read():
                    break
        except OSError as exc:
            _log.debug("the connection to the control service broke: %s", exc)
        except Exception:
            _log.exception("the control service sent what cannot be read")
        finally:
            self._finish()

    def _write(self) -> None:
        while self._outgoing:
            data = self._outgoing[0]
            try:
                count = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                return
            except BrokenPipeError:  # what it said before it ended is still read
                self._outgoing.clear()
                return
            if count == len(data):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = data[count:]

    def _read(self) -> bool:
        """False when the service has closed the connection."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, _READ, _MAX_DESCRIPTORS, _CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return True
        except ConnectionResetError:
            return False
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            self._descriptors.append(descriptor)
        for body in self._frames.feed(data):
            self._take(ipc.decode_for_node(body))
        return bool(data)

    def _take(self, message: ipc.ToNode) -> None:
        match message:
            case ipc.Ping():
                self._outgoing.append(memoryview(ipc.frame(ipc.Pong(self._work_done(), self._steps()))))
                self._write()
            case ipc.Answer(number=number, value=value):
                self._settle(number, lambda future: future.set_result(value))
            case ipc.Failed(number=number, error=error):
                self._settle(number, lambda future: future.set_exception(ipc.unpack_error(error)))
            case ipc.Connected(number=number, rank=rank, session=session):
                connection = Connection.resume(socket.socket(fileno=self._descriptors.popleft()), session)
                pending = self._pending.get(number)
                if pending is None:
                    connection.close()
                else:
                    pending.connections[rank] = connection
            case ipc.Logged(logger=name, level=level, text=text):
                logging.getLogger(name).log(level, "%s", text)
            case ipc.State():
                self._changes.put(message)
            case ipc.Happened():
                self._changes.put(ipc.event_of(message))

    def _settle(self, number: int, settle: Callable[[Future[Any]], None]) -> None:
        pending = self._pending.get(number)
        if pending is not None and not pending.answer.done():
            settle(pending.answer)

    def _finish(self) -> None:
        """The service has ended, or the connection cannot be read: whoever waits is told so."""
        self._sock.close()
        failure = self._failure = self._on_end()
        if isinstance(failure, ControlLostError):
            self._changes.put(ControlLost(str(failure)))
        for pending in tuple(self._pending.values()):
            if not pending.answer.done():
                pending.answer.set_exception(failure)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._changes.put(None)

    # --- the thread of callbacks --------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while True:
            change = self._changes.get()
            if change is None:
                return
            self._on_change(change)

    # --- a child that was forked --------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """In a child that was forked: closes its copies of the descriptors. The threads are not there."""
        self.is_forked = True
        with suppress(OSError):
            os.close(self._sock.detach())
        _close(self._wake_reader, self._wake_writer)


def _answer(pending: _Pending, timeout: float) -> msgspec.Raw:
    if not pending.answer.is_done_within(timeout):
        raise ControlLostError(f"the control service has not answered for {timeout:g} s")
    return pending.answer.result(0)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
