"""`ringfort run --metrics-port`: the metrics of all ranks of this machine, over HTTP, in Prometheus' format.

Traces are read when Prometheus asks. After its first question they are also read once a second, so that no record is
overwritten before it is counted.
"""

from __future__ import annotations

import logging
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, make_server

from ringfort.config import format_address
from ringfort.errors import BackendUnavailableError, TransportError
from ringfort.telemetry.totals import RankTotals, Totals

try:
    from prometheus_client import CollectorRegistry, exposition
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as exc:
    raise BackendUnavailableError("prometheus-client", "pip install 'ringfort[metrics]'") from exc

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

_log = logging.getLogger(__name__)

READ_SECONDS: Final = 1.0
"""Between two readings of the traces. A trace holds 2,048 records, of which a step takes one or two."""
TIMEOUT: Final = 10.0
"""Seconds that a client may take to send its request; that of Prometheus for a whole scrape."""
LABELS: Final = ("run", "host", "rank")

Samples = Iterator[tuple[tuple[str, ...], float]]
"""The values of the labels that a metric has beside `LABELS`, and its value."""
Rows = tuple[tuple[type[Metric], str, str, tuple[str, ...], Callable[[RankTotals], Samples]], ...]


def _one(get: Callable[[RankTotals], float]) -> Callable[[RankTotals], Samples]:
    return lambda totals: iter([((), get(totals))])


def _each(get: Callable[[RankTotals], Mapping[Any, float]]) -> Callable[[RankTotals], Samples]:
    return lambda totals: (((str(name),), value) for name, value in sorted(get(totals).items()))


def _info(totals: RankTotals) -> Samples:
    yield (totals.header.program, totals.header.codec), 1


_COUNTER: Final = CounterMetricFamily
_GAUGE: Final = GaugeMetricFamily
METRICS: Final[Rows] = (
    (_GAUGE, "ringfort_up", "Whether the process of the rank runs.", (), _one(lambda t: t.is_alive)),
    (_GAUGE, "ringfort_info", "Program and gradient compression of the rank.", ("program", "compression"), _info),
    (
        _GAUGE,
        "ringfort_start_time_seconds",
        "When the latest process of the rank started, since the Unix epoch.",
        (),
        _one(lambda t: t.header.started),
    ),
    (_GAUGE, "ringfort_world_size", "Ranks in the run.", (), _one(lambda t: t.header.world_size)),
    (_GAUGE, "ringfort_step", "The latest step of training.", (), _one(lambda t: t.step)),
    (
        _GAUGE,
        "ringfort_last_step",
        "The step with which training ends; 0 if the program does not say.",
        (),
        _one(lambda t: t.header.total_steps),
    ),
    (_GAUGE, "ringfort_value", "The latest value that the program logged.", ("name",), _each(lambda t: t.values)),
    (_COUNTER, "ringfort_steps", "Steps of training.", (), _one(lambda t: t.steps)),
    (_COUNTER, "ringfort_samples", "Samples that the rank has trained with.", (), _one(lambda t: t.samples)),
    (
        _COUNTER,
        "ringfort_step_seconds",
        "Time in steps: computing, waiting for data, waiting in collectives, compressing, sealing steps.",
        ("phase",),
        _each(lambda t: t.seconds),
    ),
    (_COUNTER, "ringfort_events", "Things that happened, such as a lost peer.", ("kind",), _each(lambda t: t.events)),
    (_COUNTER, "ringfort_sent_bytes", "Bytes sent to another rank.", ("peer",), _each(lambda t: t.sent)),
    (_COUNTER, "ringfort_received_bytes", "Bytes received from other ranks.", (), _one(lambda t: t.received)),
    (
        _COUNTER,
        "ringfort_lost_records",
        "Records of the trace that were overwritten before they were counted.",
        (),
        _one(lambda t: t.lost),
    ),
)
"""Kind, name, description, labels and samples of each metric. The names of counters get `_total` at their end."""


class RankCollector(Collector):
    """Makes metrics of the traces in a folder, for any thread."""

    def __init__(self, folder: Path | None, run: str, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`run` is the name of the run where the program itself gives none."""
        self._totals = None if folder is None else Totals(folder)
        self._run, self._host, self._clock = run, host, clock
        self._lock = threading.Lock()
        self._read_at = 0.0
        self._was_asked = False

    def collect(self) -> Iterable[Metric]:
        """Read the traces, and return all metrics."""
        with self._lock:
            self._was_asked = True
            self._read()
            ranks = {} if self._totals is None else self._totals.ranks
            return [self._metric(ranks, *row) for row in METRICS]

    def _metric(
        self,
        ranks: Mapping[int, RankTotals],
        kind: type[Metric],
        name: str,
        text: str,
        labels: tuple[str, ...],
        samples: Callable[[RankTotals], Samples],
    ) -> Metric:
        metric: Any = kind(name, text, labels=(*LABELS, *labels))  # pyright: ignore[reportCallIssue]
        for rank, totals in sorted(ranks.items()):
            for values, value in samples(totals):
                metric.add_metric((totals.header.run or self._run, self._host, str(rank), *values), value)
        return metric

    def tick(self) -> None:
        """Read the traces if that is due. To be called often."""
        if self._was_asked and self._clock() >= self._read_at:
            with self._lock:
                self._read()

    def _read(self) -> None:
        self._read_at = self._clock() + READ_SECONDS
        if self._totals is not None:
            self._totals.read()

    def close(self) -> None:
        """Close the traces. Idempotent."""
        with self._lock:
            if self._totals is not None:
                self._totals.close()
                self._totals = None


class _Handler(WSGIRequestHandler):
    """Answers without a word in the launcher's terminal."""

    timeout = TIMEOUT

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        _log.debug(format, *args)


class _Server(exposition.ThreadingWSGIServer):
    def server_bind(self) -> None:
        """Bind, without asking the network for the name of this machine, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = platform.node(), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nobody's fault."""
        _log.debug("Error while a client was answered", exc_info=True)


class MetricsServer:
    """Serves metrics until it is closed."""

    def __init__(self, address: str, port: int, collector: RankCollector) -> None:
        """Listen. Raises `TransportError` if that is impossible, for example because another program has the port."""
        self.collector = collector
        registry = CollectorRegistry()
        registry.register(collector)

        class Server(_Server):
            address_family = _family(address, port)

        application = cast("WSGIApplication", exposition.make_wsgi_app(registry))  # pyright: ignore[reportUnknownMemberType]
        try:
            self._server = make_server(address, port, application, Server, _Handler)
        except OSError as exc:
            raise _cannot_serve(address, port, exc) from exc
        self.address: tuple[str, int] = self._server.server_address[:2]  # pyright: ignore[reportAttributeAccessIssue]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="ringfort-metrics")
        self._thread.daemon = True
        self._thread.start()

    @property
    def url(self) -> str:
        """Where Prometheus finds the metrics."""
        return f"http://{format_address(*self.address)}/metrics"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.collector.close()


def _family(address: str, port: int) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    except (OSError, UnicodeError) as exc:
        raise _cannot_serve(address, port, exc) from exc


def _cannot_serve(address: str, port: int, exc: OSError | UnicodeError) -> TransportError:
    why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return TransportError(
        f"cannot serve metrics at {format_address(address, port)}: {why}. Choose another port, or an address of this "
        "machine, with --metrics-port"
    )
