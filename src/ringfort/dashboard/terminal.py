"""`ringfort top`: asks a source for views and shows them in a terminal, until the person quits.

What is shown is made by picture.py, which is pure. Nothing is kept here but the latest view, so memory does not grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ringfort.dashboard.drawing import UNICODE, Signs
from ringfort.dashboard.picture import picture
from ringfort.dashboard.playback import Playback, played
from ringfort.dashboard.scene import Page, Scene
from ringfort.dashboard.states import without_replaced
from ringfort.errors import DistributedError, sentence
from ringfort.telemetry.words import clean

if TYPE_CHECKING:
    from textual.events import Resize

    from ringfort.dashboard.source import Source

REFRESH: Final = 0.5
"""Seconds between two looks. Ranks report each second."""
SEEK: Final = 10.0
"""Seconds of a recording per press of a key."""
SPEEDS: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)


class Canvas(Widget):
    """Shows lines, and sends only those that have changed to the terminal: it may be far away."""

    can_focus = False

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Text] = []

    def show(self, lines: list[Text]) -> None:
        """Replace the lines."""
        before, self.shown = self.shown, lines
        changed = [
            Region(0, y, self.size.width, 1) for y, text in enumerate(lines) if y >= len(before) or before[y] != text
        ]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        """Return a line for Textual's compositor."""
        if y >= len(self.shown):
            return Strip.blank(self.size.width, self.rich_style)
        segments = self.shown[y].render(self.app.console)  # pyright: ignore[reportUnknownMemberType]
        return Strip(segments).adjust_cell_length(self.size.width).apply_style(self.rich_style)


class Terminal(App[None]):
    """The application."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    Canvas { width: 100%; height: 100%; background: ansi_default; color: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", priority=True),
        Binding("ctrl+z", "suspend_process", "to the background"),
        Binding("up,k", "select(-1)", "previous rank"),
        Binding("down,j", "select(1)", "next rank"),
        Binding("l", "page('logs')", "log"),
        Binding("e", "page('events')", "events"),
        Binding("question_mark,h,f1", "page('help')", "help"),
        Binding("escape", "page('overview')", "overview"),
        Binding("pageup", "scroll_lines(1)", "older"),
        Binding("pagedown", "scroll_lines(-1)", "newer"),
        Binding("r", "next_run", "next run"),
        Binding("p,space", "pause", "pause"),
        Binding("left", "seek(-1)", "back"),
        Binding("right", "seek(1)", "forth"),
        Binding("plus", "speed(1)", "faster"),
        Binding("minus", "speed(-1)", "slower"),
    ]

    def __init__(
        self,
        source: Source,
        run: str | None = None,
        signs: Signs = UNICODE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(ansi_color=True)  # the terminal's own colours, which fit its background
        self._source = source
        self._clock, self._began = clock, clock()
        self.scene = Scene(wanted=run, signs=signs)
        self._canvas = Canvas()

    def compose(self) -> ComposeResult:
        """Yield the only widget."""
        yield self._canvas

    def on_mount(self) -> None:
        """Look at once, and from then on."""
        self.look()
        self.set_interval(REFRESH, self.look)

    def on_resize(self, event: Resize) -> None:
        """Draw for the new size."""
        del event
        self.call_after_refresh(self.draw)

    # --- what is shown --------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Ask the source for the latest view, and show it."""
        changes: dict[str, Any] = {"waited": self._clock() - self._began, "played": played(self._source)}
        if not self.scene.is_stopped or self.scene.view is None:
            changes |= self._asked()
        self.scene = replace(self.scene, **changes)
        self.draw()

    def _asked(self) -> dict[str, Any]:
        scene = self.scene
        try:
            view = without_replaced(self._source.view(scene.wanted))
            selected = scene.selected
            if view.ranks and not any(rank.key == selected for rank in view.ranks):
                selected = view.ranks[min(scene.index, len(view.ranks) - 1)].key
            index = next((at for at, rank in enumerate(view.ranks) if rank.key == selected), 0)
            log = self._source.log(view.ranks[index].rank, view.run) if scene.page == "logs" and view.ranks else ()
        except Exception as exc:  # whatever it is, the person reads it, and the next look may succeed
            return {"failure": _failure(exc)}
        return {"view": view, "selected": selected, "log": log, "failure": ""}

    def draw(self) -> None:
        """Show the scene in the terminal's size."""
        if self.is_running and self._canvas.is_attached:
            self._canvas.show(picture(self.scene, self.size.width, self.size.height))

    def _change(self, **changes: Any) -> None:
        self.scene = replace(self.scene, **changes)
        self.look()

    # --- keys -----------------------------------------------------------------------------------------------------

    def action_select(self, by: int) -> None:
        """Select another rank."""
        ranks = self.scene.view.ranks if self.scene.view is not None else ()
        if ranks:
            index = min(max(0, self.scene.index + by), len(ranks) - 1)
            self._change(selected=ranks[index].key, scroll=0, log=())

    def action_page(self, page: Page) -> None:
        """Go to a page; from that page, back to the overview."""
        chosen: Page = "overview" if page == self.scene.page else page
        self._change(page=chosen, scroll=0)

    def action_scroll_lines(self, pages: int) -> None:
        """Go to older or newer lines of the log or the events."""
        view = self.scene.view
        known = {"logs": len(self.scene.log), "events": len(view.events) if view is not None else 0}
        by = pages * max(1, self.size.height // 2)
        by = -by if self.scene.page == "help" else by
        most = known.get(self.scene.page, self.size.height)
        self._change(scroll=min(max(0, self.scene.scroll + by), max(0, most - 1)))

    def action_next_run(self) -> None:
        """Show the next of the runs that can be seen."""
        view = self.scene.view
        if view is not None and view.runs:
            at = view.runs.index(view.run) + 1 if view.run in view.runs else 0
            self._change(wanted=view.runs[at % len(view.runs)], selected="", scroll=0, log=(), is_stopped=False)

    def action_pause(self) -> None:
        """Stop the recording or, of a live run, the picture; or let it continue."""
        if isinstance(self._source, Playback):
            self._source.playing = not self._source.playing
            self._change()
        else:
            self._change(is_stopped=not self.scene.is_stopped)

    def action_seek(self, direction: int) -> None:
        """Go back or forth in a recording."""
        source = self._source
        if isinstance(source, Playback):
            source.seek(min(max(0.0, source.position + direction * SEEK), source.duration))
            self._change()

    def action_speed(self, direction: int) -> None:
        """Play a recording faster or slower."""
        source = self._source
        if isinstance(source, Playback):
            nearest = min(SPEEDS, key=lambda speed: abs(speed - source.speed))
            source.speed = SPEEDS[min(max(0, SPEEDS.index(nearest) + direction), len(SPEEDS) - 1)]
            self._change()


def _failure(exc: Exception) -> str:
    """Return an error as a sentence."""
    words = str(exc) if isinstance(exc, DistributedError | OSError) and str(exc) else f"{type(exc).__name__}: {exc}"
    return f"No view could be made. {sentence(clean(words)).rstrip('.')}."
