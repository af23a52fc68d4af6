"""`RunWatch`: what a launcher keeps, shows and serves of its ranks while they run."""

from __future__ import annotations

import platform
from contextlib import ExitStack, closing
from pathlib import Path

from ringfort.launch.output_files import OutputFiles
from ringfort.launch.printer import Printer
from ringfort.launch.run_options import ElasticOptions, RunOptions, parse_endpoint
from ringfort.telemetry.launched_traces import LaunchedTraces


class RunWatch:
    """The traces, files and metrics of one launcher."""

    def __init__(self, options: RunOptions | ElasticOptions, printer: Printer) -> None:
        """Create what the options ask for.

        Raises `InvalidArgumentError` if output cannot be kept, `TransportError` if metrics cannot be served, and
        `BackendUnavailableError` if a package for that is missing: all before any rank is started.
        """
        # Members of an elastic run say themselves how it is called, and may have company at any time.
        is_elastic = isinstance(options, ElasticOptions)
        is_alone = not is_elastic and options.is_alone
        run = (options.name or options.title) if is_elastic else options.run_name
        host = platform.node()
        with ExitStack() as stack:
            self.traces = stack.enter_context(closing(LaunchedTraces("" if is_elastic else run)))
            folder = None if options.log_dir is None else Path(options.log_dir)
            logs = OutputFiles(folder, self.traces.folder, host="" if is_alone else host, warn=printer.say)
            self.logs = stack.enter_context(closing(logs))
            self._printer, self._status, self._metrics = printer, None, None
            if options.status and printer.has_terminal and self.traces.folder is not None:
                from ringfort.launch.status_line import StatusLine

                self._status = stack.enter_context(closing(StatusLine(self.traces.folder)))
            if options.metrics is not None:
                from ringfort.launch.metrics_server import MetricsServer, RankCollector

                collector = RankCollector(self.traces.folder, run, host)
                server = MetricsServer(*parse_endpoint(options.metrics), collector)
                self._metrics = stack.enter_context(closing(server))
                printer.say(f"metrics for Prometheus are at {server.url}")
            self._stack = stack.pop_all()

    def tick(self) -> None:
        """Do what is due. To be called often."""
        if self._status is not None:
            self._status.tick()
            self._printer.status = self._status.text
        if self._metrics is not None:
            self._metrics.collector.tick()

    def close(self) -> None:
        """Close and remove everything but the files of `--log-dir`. Idempotent."""
        self._stack.close()
