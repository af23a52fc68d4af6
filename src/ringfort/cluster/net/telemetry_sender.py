"""`TelemetrySender`: sends reports of this node's ranks to the viewers that look (`telemetry/watching.py`).

It answers for the program, which notices nothing: the traces of ranks are files. While nobody looks it reads nothing
and sends nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ringfort.cluster.net.host import clock
from ringfort.cluster.tasks import BackgroundTasks
from ringfort.errors import ProtocolError
from ringfort.telemetry import report, watching
from ringfort.telemetry.folder import traces
from ringfort.telemetry.rank_logs import next_part
from ringfort.telemetry.trace_set import TraceSet
from ringfort.telemetry.vitals import Vitals
from ringfort.telemetry.watching import LOG, LOGS, MAX_REPORTS, REPORT, REPORT_EVERY, WATCH, Watchers


class TelemetrySender:
    """Lives in the control loop. Files are read in another thread: a GPU's driver may take its time."""

    def __init__(self, send: Callable[[str, bytes, str], None], host: str, name: str, folder: Path | None) -> None:
        """`send` sends a note with a topic and a body to a peer. `folder` has the traces of a launcher's ranks."""
        self.own_trace: Path | None = None
        """The trace of the program itself, once it has one."""
        self._send = send
        self._folder = folder
        self._watchers = Watchers()
        self._traces = TraceSet(self._find, host, name)
        self._tasks = BackgroundTasks()
        self._is_running = False

    def takes(self, peer: str, topic: str, body: bytes) -> bool:
        """Answer a note, if it is a request for telemetry. Return whether it is."""
        if topic == WATCH:
            if self._watchers.renew(peer, clock()) and not self._is_running:
                self._is_running = True
                self._tasks.start(self._run())
        elif topic == LOGS:
            self._send_log(peer, body)
        return topic in (WATCH, LOGS)

    async def stop(self) -> None:
        """Stop sending."""
        await self._tasks.cancel(timeout=REPORT_EVERY)
        self._traces.close()

    async def _run(self) -> None:
        """Send a report of each rank every second, until nobody looks."""
        vitals: Vitals | None = None
        try:
            while self._watchers.current(clock()):
                began = clock()
                vitals = vitals or await asyncio.to_thread(Vitals)
                for body in await asyncio.to_thread(partial(self._collect, vitals)):
                    for peer in self._watchers.current(clock()):
                        self._send(REPORT, body, peer)
                await asyncio.sleep(max(0.0, began + REPORT_EVERY - clock()))
        finally:
            self._is_running = False
            self._traces.close()
            if vitals is not None:
                vitals.close()

    def _collect(self, vitals: Vitals) -> list[bytes]:
        found = self._traces.reports(vitals.read(), MAX_REPORTS)
        bodies = [report.encode(one) for one in found]
        return [body for body in bodies if len(body) <= report.MAX_REPORT_BYTES]

    def _find(self) -> Iterator[Path]:
        if self._folder is not None:
            yield from traces(self._folder)
        if self.own_trace is not None and self.own_trace.parent != self._folder:
            yield self.own_trace

    def _send_log(self, peer: str, body: bytes) -> None:
        try:
            asked = watching.decode_request(body)
        except ProtocolError:
            return
        trace = self._traces.trace_of(asked.rank)
        if trace is not None and self._watchers.may_log(peer, asked.rank, clock()):
            part = next_part(trace, asked)
            if part is not None:
                self._watchers.logged(peer, asked.rank, clock())
                self._send(LOG, watching.encode(part), peer)
