"""The trace of this process, in a folder of the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfort.telemetry.trace import Trace, own_trace


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Trace]:
    """A new trace of this process."""
    monkeypatch.setenv("RINGFORT_TELEMETRY", str(tmp_path))
    own_trace.cache_clear()
    trace = own_trace()
    yield trace
    trace.close()
    own_trace.cache_clear()
