"""`LaunchedTraces`: the folder in which a launcher's ranks write their traces, and how far they are."""

from __future__ import annotations

import logging
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from ringfort.config import RUN, TELEMETRY, telemetry_folder
from ringfort.errors import ProtocolError
from ringfort.telemetry.folder import new_folder, traces
from ringfort.telemetry.trace import OFF
from ringfort.telemetry.trace_file import TraceReader

_log = logging.getLogger(__name__)


class LaunchedTraces:
    """The traces of one launcher's ranks. `step` may be called from any thread."""

    def __init__(self, run: str = "") -> None:
        """Create the folder, unless this process was told `off`. `run` is the name of the run that ranks show, unless
        they know one themselves."""
        self._run = run
        self.folder: Path | None = None
        """None if telemetry is off, or if the folder could not be created."""
        if telemetry_folder() != OFF:
            try:
                self.folder = new_folder()
            except OSError as exc:
                _log.info("No telemetry of the ranks can be seen: %s", exc)
        self._lock = threading.Lock()
        self._step = 0
        self._readers: dict[Path, TraceReader | None] = {}
        """None for those whose process has ended."""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that tell a rank where to write, and for which run."""
        return {TELEMETRY: OFF if self.folder is None else str(self.folder), RUN: self._run}

    def step(self) -> int:
        """Return the latest step of any rank; 0 if there is none."""
        with self._lock:
            for path in traces(self.folder) if self.folder is not None else ():
                if path not in self._readers:
                    with suppress(OSError, ProtocolError):  # just being created, or removed
                        self._readers[path] = TraceReader(path)
            for path, reader in self._readers.items():
                if reader is not None:
                    self._step = max(self._step, reader.step)
                    if not reader.is_alive():
                        reader.close()
                        self._readers[path] = None
            return self._step

    def clear(self) -> None:
        """Reset the step to 0, before the ranks are started again. The traces of those that have ended stay."""
        self.step()
        with self._lock:
            self._step = 0

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        with self._lock:
            folder, self.folder = self.folder, None
            for reader in self._readers.values():
                if reader is not None:
                    reader.close()
            self._readers.clear()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
