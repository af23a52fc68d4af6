"""`Hub`: sends views to the browsers that look, twice a second, and asks the source for nothing while nobody looks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from ringfort.cluster.net.waiting import within
from ringfort.dashboard.recording import RecordedSource
from ringfort.dashboard.web.feed import Feed, Playback
from ringfort.telemetry.view import RunView

if TYPE_CHECKING:
    from ringfort.dashboard.source import Source

INTERVAL: Final = 0.5
"""Seconds between two views. People see a loss within two seconds; reports of ranks come once a second."""
MAX_VIEWERS: Final = 16
"""Pages that are open at a time. If one more comes, the one that was opened first is closed."""
MAX_WAITING: Final = 8
"""Messages for one page. A page that is further behind is closed; it connects again and gets everything anew."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(eq=False)
class Viewer:
    """A page that is open."""

    run: str | None
    messages: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING))
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    is_new: bool = True

    def send(self, message: bytes) -> None:
        """Give it a message, or close it if it takes none."""
        try:
            self.messages.put_nowait(message)
        except asyncio.QueueFull:
            self.closed.set()


class Hub:
    """The pages that are open. All methods are for one event loop."""

    def __init__(self, source: Source, run: str | None = None, interval: float = INTERVAL) -> None:
        self.source = source
        self._run, self._interval = run, interval
        self._viewers: list[Viewer] = []
        self._feeds: dict[str | None, Feed] = {}
        self._wake = asyncio.Event()
        self._is_closed = False
        # A thread, because a view of many ranks takes some milliseconds; one, so that views do not pile up.
        self._thread = ThreadPoolExecutor(1, "ringfort-dash-source")

    @property
    def viewers(self) -> int:
        """How many pages are open."""
        return len(self._viewers)

    def join(self, run: str | None) -> Viewer:
        """Add a page. Its first message comes at once."""
        viewer = Viewer(run or self._run)
        if self._is_closed:
            viewer.closed.set()
            return viewer
        self._viewers.append(viewer)
        for oldest in self._viewers[:-MAX_VIEWERS]:
            self.leave(oldest)
        self.look_now()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Remove a page."""
        viewer.closed.set()
        with suppress(ValueError):
            self._viewers.remove(viewer)

    def look_now(self) -> None:
        """Do not wait with the next view."""
        self._wake.set()

    async def ask(self, what: Callable[[], _T]) -> _T:
        """Return what the source answers."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, what)

    async def serve(self) -> None:
        """Send views, until it is cancelled."""
        try:
            while True:
                if not self._viewers:
                    self._feeds.clear()
                    await self._wake.wait()
                self._wake.clear()
                await self._send_views()
                with suppress(TimeoutError):
                    await within(self._interval, self._wake.wait())
        finally:
            self._thread.shutdown()

    def close(self) -> None:
        """Close all pages, and let no other in. They try to connect again."""
        self._is_closed = True
        for viewer in list(self._viewers):
            self.leave(viewer)

    async def _send_views(self) -> None:
        wanted = {viewer.run for viewer in self._viewers}
        self._feeds = {run: self._feeds.get(run) or Feed() for run in wanted}
        for run, feed in self._feeds.items():
            view, playback = await self.ask(partial(_look, self.source, run))
            change, everything = feed.take(view, playback), b""
            for viewer in self._viewers:
                if viewer.run != run:
                    continue
                if viewer.is_new:
                    everything = everything or feed.everything()
                viewer.send(everything if viewer.is_new else change)
                viewer.is_new = False


def _look(source: Source, run: str | None) -> tuple[RunView, Playback | None]:
    """What the source shows. A fault in it is shown too: the page of the night must not end with it."""
    try:
        view = source.view(run)
    except Exception as exc:
        _log.exception("Failed to make a view of the run")
        view = RunView(time.time(), run or "", notice=f"ringfort dash failed to make this view: {exc!r}")
    return view, playback_of(source)


def playback_of(source: Source) -> Playback | None:
    """Where a recording is; None if it is not one."""
    if not isinstance(source, RecordedSource):
        return None
    return Playback(round(source.position, 2), round(source.duration, 2), source.playing, source.speed)
