"""`ControlService`: serves one `ClusterNode` over a Unix socket. It has the loop in which `Control` lives, in a process
of its own beside the training process or, for observers, in a thread of it.

A process of its own answers heartbeats while the training process holds its interpreter lock, and can say goodbye for
it when it has died.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.events import ClusterEvent, Noted
from ringfort.cluster.diagnosis import explain
from ringfort.cluster.net import ipc
from ringfort.cluster.net.control import STOP_WITHIN, Control
from ringfort.cluster.net.epoch_connections import EpochConnections
from ringfort.cluster.net.process_watch import ProcessWatch
from ringfort.cluster.net.setup import Setup
from ringfort.errors import ChannelClosedError, RendezvousTimeoutError

_log = logging.getLogger(__name__)

PING_EVERY: Final = 0.25
"""Seconds between two questions whether the program's interpreter runs."""
BUSY_AFTER: Final = 0.5
"""Seconds without an answer after which the program is busy."""
_DEAD_WITHIN: Final = 10
"""Seconds after the end of the training process within which the control process has ended, too."""
MAX_UNREAD: Final = 64 * 1024 * 1024
"""Bytes of notes that may wait for a program which does not read. Later notes are dropped."""
_READ: Final = 1 << 16


class ControlService:
    """`run` returns when the node has said `Stop`, or is gone."""

    def __init__(self, sock: socket.socket, watch: ProcessWatch | None = None) -> None:
        """`watch` is given where the node is in another process, the parent."""
        self.control: Control | None = None
        self._sock = sock
        self._watch = watch
        self._frames = ipc.Frames()
        self._unsent: deque[tuple[memoryview, list[socket.socket]]] = deque()
        """What the socket has not taken yet, and the sockets that go along with each."""
        self._unsent_bytes = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._work = 0
        self._state: ipc.State | None = None
        self._asked_at: float | None = None
        """When the ping that has no answer yet was sent."""

    async def run(self) -> None:
        """Serves until the end. The socket is closed then."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._end: asyncio.Future[tuple[str, bool]] = loop.create_future()
        self._sock.setblocking(False)
        loop.add_reader(self._sock, self._readable)
        if self._watch is not None and self._watch.descriptor is not None:
            loop.add_reader(self._watch.descriptor, self._gone)
        ping = loop.call_later(PING_EVERY, self._ping)
        try:
            why, died = await self._end
            for task in tuple(self._tasks.values()):
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks.values(), timeout=STOP_WITHIN)
            if self.control is not None:
                await self.control.stop(why, died=died)
        finally:
            ping.cancel()
            self._is_over = True
            loop.remove_reader(self._sock)
            loop.remove_writer(self._sock)
            self._drop_unsent()
            self._sock.close()
            if self._watch is not None:
                if self._watch.descriptor is not None:
                    loop.remove_reader(self._watch.descriptor)
                self._watch.close()

    _is_over = False

    def _gone(self) -> None:
        """The training process has ended without a word: its peers hear it from here, at once."""
        if self._watch is not None:
            if self._watch.descriptor is not None:
                self._loop.remove_reader(self._watch.descriptor)  # it stays readable
            signal.alarm(_DEAD_WITHIN)  # whatever hangs: a control process never outlives its training process for long
        self._stop("its process ended without closing its node", died=True)

    def _stop(self, why: str, *, died: bool = False) -> None:
        if not self._end.done():
            self._end.set_result((why, died))

    # --- what the node says -----------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._sock)
            self._gone()
            return
        for body in self._frames.feed(data):
            message = ipc.decode_for_service(body)
            match message:
                case ipc.Ask(number=number, request=request, work=work):
                    self._work = work
                    self._asked(number, request)
                case ipc.Cancel(number=number):
                    if number in self._tasks:
                        self._tasks[number].cancel()
                case ipc.Pong(work=work, step=step):
                    self._work, self._asked_at = work, None
                    if self.control is not None:
                        self.control.set_busy(False)
                        self.control.set_step(step)

    def _asked(self, number: int, request: ipc.AnyRequest) -> None:
        if isinstance(request, ipc.Stop):
            self._stop(request.why)
        elif isinstance(request, (ipc.Start, ipc.Form)):
            work = self._start(number, request) if isinstance(request, ipc.Start) else self._form(number, request)
            task = self._tasks[number] = asyncio.ensure_future(work)
            task.add_done_callback(lambda _: self._tasks.pop(number, None))
        else:
            try:
                self._answer(number, self._carry_out(request))
            except Exception as exc:
                self._failed(number, exc)

    def _carry_out(self, request: ipc.AnyRequest) -> Any:
        control = self.control
        if control is None:
            raise ChannelClosedError("this node is not running; call start()")
        match request:
            case ipc.Hold(holding=holding):
                control.hold(holding)
            case ipc.ForceElection():
                control.force_election()
            case ipc.StepDown():
                control.step_down()
            case ipc.Tell(topic=topic, body=body, peer=peer):
                control.tell(topic, body, peer)
            case ipc.Peers():
                return explain.view_peers(control)
            case ipc.Health():
                return control.core.health_summary()
            case ipc.Topology():
                return control.speeds.known().records
            case ipc.Refusals():
                return tuple(control.finder.refusals)
            case ipc.WhyAlone():
                return explain.why_alone(control)
            case _:
                raise TypeError(f"{type(request).__name__} is no request")
        return None

    async def _start(self, number: int, request: ipc.Start) -> None:
        if self._watch is not None:
            _forward_logs(self, request.log_level)
        try:
            control = Control(
                Setup.resume(request.setup),
                self._publish,
                lambda: self._work,
                on_change=self._tell_state,
                before_tick=self._before_tick,
            )
            await control.start()
        except Exception as exc:
            self._failed(number, exc)
            return
        self.control = control
        state = self._tell_state()
        self._answer(number, state)

    async def _form(self, number: int, request: ipc.Form) -> None:
        try:
            if self.control is None:
                raise ChannelClosedError("this node is not running; call start()")
            connections = await _within(request.timeout, self.control.forming, request)
        except Exception as exc:
            self._failed(number, exc)
            return
        for rank, connection in connections.items():
            self._send(ipc.Connected(number, rank, connection.session), [connection.sock])
        self._answer(number, None)

    # --- what the node is told ----------------------------------------------------------------------------------------

    def _publish(self, event: ClusterEvent) -> None:
        if isinstance(event, Noted) and self._unsent_bytes > MAX_UNREAD:
            return
        self._send(ipc.happened(event))

    def _tell_state(self) -> ipc.State:
        control = self.control
        if control is None:  # it is starting; the answer to that has the state
            return ipc.State()
        core = control.core
        state = ipc.State(core.epoch, core.leader, core.election.state, core.me.addresses)
        if state != self._state:
            self._state = state
            self._send(state)
        return state

    def _answer(self, number: int, value: Any) -> None:
        self._send(ipc.Answer(number, ipc.msgspec.Raw(ipc.encode(value))))

    def _failed(self, number: int, exc: Exception) -> None:
        error = ipc.pack_error(exc)
        if error.kind == "DistributedError":
            _log.error("a request failed", exc_info=exc)
        self._send(ipc.Failed(number, error))

    def log(self, record: logging.LogRecord, text: str) -> None:
        """Passes a log record on."""
        self._send(ipc.Logged(record.name, record.levelno, text))

    def _send(self, message: ipc.ToNode, sockets: Sequence[socket.socket] = ()) -> None:
        """Queues a message; `sockets` go along and are closed here."""
        if self._is_over:
            for sock in sockets:
                sock.close()
            return
        data = ipc.frame(message)
        self._unsent.append((memoryview(data), list(sockets)))
        self._unsent_bytes += len(data)
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            data, sockets = self._unsent[0]
            try:
                if sockets:
                    count = socket.send_fds(self._sock, [data], [sock.fileno() for sock in sockets])
                else:
                    count = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError:  # nobody reads any more: the reader learns of it
                self._drop_unsent()
                break
            for sock in sockets:  # they left with the first byte
                sock.close()
            self._unsent_bytes -= count
            if count < len(data):
                self._unsent[0] = (data[count:], [])
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._sock)

    def _drop_unsent(self) -> None:
        for _, sockets in self._unsent:
            for sock in sockets:
                sock.close()
        self._unsent.clear()

    # --- how the training process is ----------------------------------------------------------------------------------

    def _ping(self) -> None:
        if self._end.done():
            return
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._send(ipc.Ping())
        elif now - self._asked_at >= BUSY_AFTER and self.control is not None:
            self.control.set_busy(True)
        self._loop.call_later(PING_EVERY, self._ping)

    def _before_tick(self) -> None:
        """Before every heartbeat: one that is stopped sends none, and its control process must look the same."""
        if self._watch is not None:
            self._watch.wait_while_stopped()
            if self._watch.has_ended:
                self._gone()


async def _within(timeout: float, forming: EpochConnections, request: ipc.Form) -> dict[int, Connection]:
    """Raises `RendezvousTimeoutError` with who is missing."""
    work = asyncio.ensure_future(forming.connect(request.epoch, request.machine))
    try:
        await asyncio.wait({work}, timeout=timeout)
        if work.done():
            return work.result()
        missing = forming.missing()
        state = "; ".join(f"rank {rank}: {why}" for rank, why in missing.items())
        raise RendezvousTimeoutError(f"connecting {request.epoch}", timeout, missing=tuple(missing), state=state)
    finally:
        work.cancel()


class _LogForwarder(logging.Handler):
    def __init__(self, service: ControlService, level: int) -> None:
        super().__init__(level)
        self._service = service

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):
            self._service.log(record, self.format(record))


def _forward_logs(service: ControlService, level: int) -> None:
    """In a process of its own: what Ringfort logs goes to where the person has configured logging. Of other libraries
    (asyncio, zeroconf), warnings do."""
    logging.getLogger("ringfort").setLevel(level)
    logging.getLogger().addHandler(_LogForwarder(service, min(level, logging.WARNING)))


_NOT_OURS: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
"""What a terminal, a scheduler or a service manager sends to all processes of a program."""


def main(descriptor: int, pidfd: int) -> None:
    """What the control process runs. `pidfd` is -1 where there is none."""
    # It ends with its training process and not before: that one may take its time over a signal to the whole group.
    for number in _NOT_OURS:
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")  # keeps no folder in use
    for each in (descriptor, pidfd):
        if each >= 0:
            os.set_inheritable(each, False)
    watch = ProcessWatch(pidfd if pidfd >= 0 else None)
    asyncio.run(_serve(ControlService(socket.socket(fileno=descriptor), watch)))


async def _serve(service: ControlService) -> None:
    await service.run()
    # Here and not after `asyncio.run`, which waits without limit for tasks that do not let themselves be cancelled.
    os._exit(0)  # nothing is left to do, and to take the interpreter apart would take 0.1 s that `close` waits for
