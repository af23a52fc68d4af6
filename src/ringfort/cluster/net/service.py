"""`ControlService`: serves one `ClusterNode` over a Unix socket. It owns the loop in which `Control` lives, in a
process of its own beside the training process or, for observers, in a thread of it.

A separate process answers heartbeats while the training process holds its interpreter lock, and reports its death.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.events import ClusterEvent, Noted
from ringfort.cluster.core.peer_messages import Epoch, RunState
from ringfort.cluster.diagnosis import explain
from ringfort.cluster.net import ipc
from ringfort.cluster.net.control import STOP_WITHIN, Control
from ringfort.cluster.net.ipc_connection import IpcConnection
from ringfort.cluster.net.process_watch import ProcessWatch
from ringfort.errors import ChannelClosedError, DistributedError

_log = logging.getLogger(__name__)

T = TypeVar("T")

PING_EVERY: Final = 0.25
"""Seconds between two checks that the program's interpreter responds."""
BUSY_AFTER: Final = 0.5
"""Seconds without a response after which the program counts as busy."""
_DEAD_WITHIN: Final = 10
"""Seconds after the end of the training process by which the control process has ended as well."""
MAX_UNREAD: Final = 64 * 1024 * 1024
"""Bytes of notes that may wait for a program that does not read them. Later notes are dropped."""


def _as(kind: type[T], value: object) -> T:
    """Return an argument that has travelled as plain values as what it was."""
    return msgspec.convert(value, kind)


FUNCTIONS: Final[dict[str, Callable[[Control, tuple[Any, ...]], object]]] = {
    "hold": lambda control, args: control.driver.call(control.core.hold, *args),
    "set_run_state": lambda control, args: control.driver.call(control.core.set_run_state, _as(RunState, args[0])),
    "learned": lambda control, args: control.driver.call(
        control.core.learned, _as(Epoch, args[0]), _as(RunState, args[1])
    ),
    "give_up": lambda control, args: control.driver.call(
        control.core.give_up, _as(int, args[0]), _as(RunState, args[1]), _as(str, args[2])
    ),
    "force_election": lambda control, _: control.driver.call(control.core.force_election),
    "step_down": lambda control, _: control.driver.call(control.core.step_down),
    "state_sources": lambda control, _: control.core.state_sources(),
    "tell": lambda control, args: control.send_note(*args),
    "snapshot": lambda control, _: explain.view_peers(control),
    "health_summary": lambda control, _: control.core.health_summary(),
    "topology": lambda control, _: control.link_metrics.current_topology().records,
    "refusals": lambda control, _: tuple(control.connector.refusals),
    "why_alone": lambda control, _: explain.why_alone(control),
}
"""What a node may call, under the names of its methods."""


class ControlService:
    """`run` returns when the node has sent `Stop` or is gone."""

    def __init__(self, sock: socket.socket, watch: ProcessWatch | None = None) -> None:
        """Pass `watch` if the node is in the parent process."""
        self.control: Control | None = None
        self._connection = IpcConnection(sock, ipc.decode_for_service, self._on_message, self._on_death)
        self._watch = watch
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._work = 0
        self._state: ipc.State | None = None
        self._pinged_at: float | None = None
        """When the unanswered ping was sent."""

    async def run(self) -> None:
        """Serve until the end, then close the socket."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._end: asyncio.Future[tuple[str, bool]] = loop.create_future()
        self._connection.start()
        parent = None if self._watch is None else self._watch.descriptor
        if parent is not None:
            loop.add_reader(parent, self._on_death)
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
            self._connection.close()
            if parent is not None:
                loop.remove_reader(parent)
            if self._watch is not None:
                self._watch.close()

    def _on_death(self) -> None:
        """Report to the peers at once that the training process has ended without closing its node."""
        if self._watch is not None:
            if self._watch.descriptor is not None:
                self._loop.remove_reader(self._watch.descriptor)  # it stays readable
            signal.alarm(_DEAD_WITHIN)  # whatever hangs, a control process does not outlive its training process long
        self._stop("its process ended without closing its node", died=True)

    def _stop(self, why: str, *, died: bool = False) -> None:
        if not self._end.done():
            self._end.set_result((why, died))

    # --- requests of the node ---------------------------------------------------------------------------------------

    def _on_message(self, message: ipc.ToService) -> None:
        match message:
            case ipc.Stop(why=why, returns=returns):
                self._stop(why, died=returns)
            case ipc.Ask(number=number, request=request, work=work):
                self._work = work
                task = self._tasks[number] = asyncio.ensure_future(self._answer(number, request))
                task.add_done_callback(lambda _: self._tasks.pop(number, None))
            case ipc.Cancel(number=number):
                if number in self._tasks:
                    self._tasks[number].cancel()
            case ipc.Fenced(epoch=epoch, state=state):
                if self.control is not None:
                    self.control.driver.call(self.control.core.fenced, epoch, state)
            case ipc.StreamTaken():
                if self.control is not None:
                    self.control.streams.taken()
            case ipc.Pong(work=work, step=step, trace=trace):
                self._work, self._pinged_at = work, None
                if self.control is not None:
                    self.control.driver.call(self.control.core.set_busy, False)
                    self.control.core.set_step(step)
                    self.control.telemetry.own_trace = Path(trace) if trace else None

    async def _answer(self, number: int, request: ipc.AnyRequest) -> None:
        try:
            value = await self._carry_out(number, request)
        except Exception as exc:
            if not isinstance(exc, DistributedError):
                _log.error("A request to the control service failed", exc_info=exc)
            self._connection.send(ipc.failed(number, exc))
        else:
            self._connection.send(ipc.Answer(number, ipc.msgspec.Raw(ipc.encode(value))))

    async def _carry_out(self, number: int, request: ipc.AnyRequest) -> Any:
        if isinstance(request, ipc.Start):
            return await self._start(request)
        control = self.control
        if control is None:
            raise ChannelClosedError("this node is not running; call start()")
        if isinstance(request, ipc.Call):
            return FUNCTIONS[request.function](control, request.arguments)
        if isinstance(request, ipc.OpenStream):
            connection = await control.streams.open(request.peer, request.purpose, request.timeout)
            self._connection.send(ipc.Connected(number, 0, connection.session), [connection.sock])
            return None
        connections = await control.epoch_connections.connect(request.epoch, request.machine, request.timeout)
        for rank, connection in connections.items():
            self._connection.send(ipc.Connected(number, rank, connection.session), [connection.sock])
        return None

    async def _start(self, request: ipc.Start) -> ipc.State:
        if self._watch is not None:
            _forward_logs(self._connection, request.log_level)
        control = Control(
            request.setup,
            self._publish,
            lambda: self._work,
            on_change=self._send_state,
            before_tick=self._before_tick,
            on_stream=self._send_stream,
            on_fence=lambda fence: self._connection.send(ipc.Fence(fence.epoch, fence.ended)),
        )
        await control.start()
        self.control = control
        return self._send_state()

    # --- messages to the node -----------------------------------------------------------------------------------------

    def _publish(self, event: ClusterEvent) -> None:
        if not isinstance(event, Noted) or self._connection.unsent_bytes <= MAX_UNREAD:
            self._connection.send(ipc.happened(event))

    def _send_stream(self, peer: str, purpose: str, connection: Connection) -> None:
        self._connection.send(ipc.Streamed(peer, purpose, connection.session), [connection.sock])

    def _send_state(self) -> ipc.State:
        if self.control is None:  # it is starting; the answer to `Start` contains the state
            return ipc.State()
        core = self.control.core
        state = ipc.State(core.epoch, core.leader, core.election.state, core.me.addresses)
        if state != self._state:
            self._state = state
            self._connection.send(state)
        return state

    # --- the training process -----------------------------------------------------------------------------------------

    def _ping(self) -> None:
        if self._end.done():
            return
        now = time.monotonic()
        if self._pinged_at is None:
            self._pinged_at = now
            self._connection.send(ipc.Ping())
        elif now - self._pinged_at >= BUSY_AFTER and self.control is not None:
            self.control.driver.call(self.control.core.set_busy, True)
        self._loop.call_later(PING_EVERY, self._ping)

    def _before_tick(self) -> None:
        """Send no heartbeats for a training process that is stopped: its peers are to see it as silent."""
        if self._watch is not None:
            self._watch.wait_while_stopped()
            if self._watch.has_ended:
                self._on_death()


class _LogForwarder(logging.Handler):
    def __init__(self, connection: IpcConnection[ipc.ToService], level: int) -> None:
        super().__init__(level)
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):
            self._connection.send(ipc.Logged(record.name, record.levelno, self.format(record)))


def _forward_logs(connection: IpcConnection[ipc.ToService], level: int) -> None:
    """Send log records to the training process, where logging is configured: all of Ringfort's from `level` on, and
    warnings of other libraries (asyncio, zeroconf)."""
    logging.getLogger("ringfort").setLevel(level)
    logging.getLogger().addHandler(_LogForwarder(connection, min(level, logging.WARNING)))


_IGNORED_SIGNALS: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals that a terminal, a scheduler or a service manager sends to all processes of a program."""


def main(descriptor: int, pidfd: int) -> None:
    """Run the control process. `pidfd` is -1 if there is none."""
    # It ends with its training process and not before: that one may take its time to handle a signal to the group.
    for name in _IGNORED_SIGNALS:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    os.chdir("/")  # keeps no folder in use
    for each in (descriptor, pidfd):
        if each >= 0:
            os.set_inheritable(each, False)
    watch = ProcessWatch(pidfd if pidfd >= 0 else None)
    asyncio.run(_serve(ControlService(socket.socket(fileno=descriptor), watch)))


async def _serve(service: ControlService) -> None:
    await service.run()
    # Here and not after `asyncio.run`, which waits without limit for tasks that ignore cancellation.
    os._exit(0)  # nothing is left to do, and shutting the interpreter down would take 0.1 s that `close` waits for
