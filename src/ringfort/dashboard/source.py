"""Where the views of a run come from: `LiveSource` watches the cluster and this machine, and
`recording.RecordedSource` plays a recording.

    with LiveSource(AutoDiscoveryConfig()) as source:
        view = source.view()
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from ringfort.cluster.core.events import ClusterEvent, ControlLost, PeerJoined
from ringfort.cluster.net.host import host_id
from ringfort.cluster.node import ClusterNode
from ringfort.config import AutoDiscoveryConfig
from ringfort.dashboard.intake import Intake, links_of
from ringfort.dashboard.known import AnyFrame, Known, Linked, Printed
from ringfort.dashboard.recording_file import Recorder
from ringfort.errors import ConfigError, DistributedError
from ringfort.telemetry import watching
from ringfort.telemetry.folder import base_folder, programs, traces
from ringfort.telemetry.rank_logs import next_part
from ringfort.telemetry.report import LOCAL_BYTES
from ringfort.telemetry.trace_set import TraceSet
from ringfort.telemetry.view import LinkView, RunView
from ringfort.telemetry.vitals import Vitals
from ringfort.telemetry.watching import LOGS, MAX_LOGS, RENEW_EVERY, REPORT_EVERY, WATCH
from ringfort.transport.locks import Thread

if TYPE_CHECKING:
    from typing_extensions import Self

LINKS_EVERY: Final = 5.0
"""Seconds between two looks at the links between machines: they are measured when machines meet."""
ASKED: Final = 5.0
"""Seconds for which the output of a rank is fetched after it was asked for."""
MAX_ASKED: Final = MAX_LOGS
"""Ranks whose output is fetched at the same time."""
MAX_PARTS: Final = 40
"""Parts of the output of a rank of this machine that are read at once: all there is."""
_ONLY_HERE: Final = "Only this machine is seen:"


class Source(Protocol):
    """Gives views of runs. A context manager; all methods are thread-safe and none of them waits for the network."""

    def view(self, run: str | None = None) -> RunView:
        """Return the run named `run` as it is now; by default the one in which most happens. Cheap: it may be called
        several times a second."""
        ...

    def log(self, rank: int, run: str | None = None) -> list[str]:
        """Return the last lines of output that are known of a rank, oldest first, without control characters. While it
        is called at least every few seconds, more are fetched in the background."""
        ...

    def close(self) -> None:
        """End. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class LiveSource:
    """Watches the cluster as an observer, and reads the traces of this machine."""

    def __init__(
        self,
        config: AutoDiscoveryConfig | None = None,
        *,
        record: Path | None = None,
        only_here: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare it; entering it as a context manager starts it. `record` is a new file for a recording. With
        `only_here` it looks at no other machine, and uses no network."""
        self._config, self._record, self._only_here, self._clock = config, record, only_here, clock
        self._lock = threading.RLock()
        self._known = Known(clock)
        self._intake = Intake(self._feed)
        self._node: ClusterNode | None = None
        self._recorder: Recorder | None = None
        self._trouble = ""
        """Why only this machine is seen."""
        self._local_trouble = ""
        self._traces = TraceSet(self._find, name=platform.node()[:64], clock=clock, limit=LOCAL_BYTES)
        self._asked: dict[tuple[str, int], float] = {}
        """When the output of each run and rank was last asked for."""
        self._shown = ""
        """The run that was shown last."""
        self._links: tuple[LinkView, ...] = ()
        self._linked_at = self._renewed_at = 0.0
        self._wake = threading.Event()
        self._is_over = False
        self._stack = ExitStack()

    # --- life -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start to look. Raises `ConfigError` for invalid settings, `InvalidArgumentError` if the recording cannot be
        created. Without a network or a cluster key, only this machine is seen, and a notice says so."""
        with self._stack as stack:
            if self._record is not None:
                self._recorder = Recorder(self._record)
                stack.callback(self._recorder.close)
            self._intake.host = self._traces.host = host_id(b"")
            if not self._only_here:
                self._start_node(stack)
            stack.callback(self._traces.close)
            self._vitals = Vitals()
            stack.callback(self._vitals.close)
            thread = Thread(self._run, name="ringfort-viewer")
            stack.callback(thread.join)
            thread.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """See `Source`."""
        self._is_over = True
        self._wake.set()
        self._stack.close()

    def _start_node(self, stack: ExitStack) -> None:
        try:
            node = ClusterNode(self._config, slots=0, listens=False)
            stack.callback(node.close)
            stack.callback(node.subscribe(self._on_event))
            node.start()
            with self._lock:
                self._intake.set_peers(node.snapshot(), self._clock())
                self._traces.host, self._node = self._intake.host, node
        except (DistributedError, OSError) as exc:
            if isinstance(exc, ConfigError) and exc.value:
                raise  # what was typed is wrong, not what is missing here
            self._trouble = f"{_ONLY_HERE} {exc}"

    def _find(self) -> Iterator[Path]:
        try:
            base = base_folder()
            self._local_trouble = ""
        except OSError as exc:
            self._local_trouble = f"Runs of this machine cannot be seen: {exc}"
            return
        for folder in programs(base):
            yield from traces(folder)

    # --- views ------------------------------------------------------------------------------------------------------

    def view(self, run: str | None = None) -> RunView:
        """See `Source`."""
        with self._lock:
            view = self._known.history.view(run)
            self._shown = view.run
            stopped = self._recorder.notice if self._recorder is not None else ""
            nobody = "" if view.runs or self._trouble or self._only_here else self._nobody()
            notices = (view.notice, self._trouble, self._local_trouble, nobody, stopped)
            return msgspec.structs.replace(view, notice=" ".join(filter(None, notices)))

    def _nobody(self) -> str:
        others = self._intake.peers
        if not others:
            return "No other peer has been found yet; `ringfort doctor` says what may be wrong."
        return f"{others} peer{'' if others == 1 else 's'} of the cluster can be seen; none has reported a step yet."

    def log(self, rank: int, run: str | None = None) -> list[str]:
        """See `Source`."""
        with self._lock:
            run = self._shown if run is None else run
            if (run, rank) not in self._asked:
                self._wake.set()
            self._asked[run, rank] = self._clock()
            return self._known.output(run, rank).lines()

    def _feed(self, frame: AnyFrame, at: float) -> None:
        self._known.take(frame, at)
        if self._recorder is not None:
            self._recorder.write(frame, at)

    # --- the background ---------------------------------------------------------------------------------------------

    def _on_event(self, event: ClusterEvent) -> None:
        with self._lock:
            if isinstance(event, ControlLost):
                self._node, self._trouble = None, f"{_ONLY_HERE} {event}"
            self._intake.take_event(event, self._clock())
        if isinstance(event, PeerJoined):
            self._wake.set()

    def _run(self) -> None:
        while not self._is_over:
            is_joined = self._wake.is_set()
            self._wake.clear()
            self._look_here()
            node = self._node
            if node is not None and not self._is_over:
                try:
                    self._look_there(node, is_joined=is_joined)
                except DistributedError as exc:
                    self._node, self._trouble = None, f"{_ONLY_HERE} {exc}"
            if self._recorder is not None:
                with self._lock:
                    self._recorder.flush()
            if not self._is_over:
                self._wake.wait(REPORT_EVERY)

    def _look_here(self) -> None:
        """Read the traces of this machine, and the output that was asked for."""
        reports = self._traces.reports(self._vitals.read())
        with self._lock:
            now = self._clock()
            self._intake.take_local(reports, now)
            self._asked = {key: at for key, at in self._asked.items() if now - at < ASKED}
            wanted = sorted(self._asked, key=self._asked.__getitem__)[-MAX_ASKED:]
            self._intake.wanted = frozenset(wanted)
            for run, rank in wanted:
                # A rank that ended here may live on another machine.
                is_there = self._intake.peer_of(run, rank) is not None
                trace = self._traces.trace_of(rank, run, ended=not is_there)
                if trace is not None:
                    self._read_output(trace, run, rank, now)

    def _read_output(self, trace: Path, run: str, rank: int, now: float) -> None:
        for _ in range(MAX_PARTS):
            part = next_part(trace, self._known.output(run, rank).request(rank))
            if part is None:
                break
            self._feed(Printed(run, part), now)

    def _look_there(self, node: ClusterNode, *, is_joined: bool) -> None:
        """Ask the peers of the cluster, and see who they are."""
        now = self._clock()
        if is_joined or not 0 <= now - self._renewed_at < RENEW_EVERY - REPORT_EVERY / 2:
            self._renewed_at = now
            node.tell(WATCH, b"")
        peers, refusals, links = node.snapshot(), node.refusals(), links_of(node.topology())
        with self._lock:
            self._intake.set_peers(peers, now)
            self._intake.set_refusals(refusals, now)
            if links != self._links and not 0 <= now - self._linked_at < LINKS_EVERY:
                self._links, self._linked_at = links, now
                self._feed(Linked(links), now)
            asked = [
                (peer, self._known.output(run, rank).request(rank))
                for run, rank in self._intake.wanted
                if self._traces.trace_of(rank, run, ended=False) is None
                and (peer := self._intake.peer_of(run, rank)) is not None
            ]
        for peer, request in asked:
            node.tell(LOGS, watching.encode(request), peer)
