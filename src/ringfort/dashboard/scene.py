"""`Scene`: all that decides what a terminal shows, except for its size. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ringfort.dashboard.drawing import UNICODE, Signs
from ringfort.dashboard.playback import Played
from ringfort.telemetry.view import RunView

Page = Literal["overview", "logs", "events", "help"]


@dataclass(frozen=True)
class Scene:
    """What is shown: a view, and what the person who looks has chosen."""

    view: RunView | None = None
    page: Page = "overview"
    selected: str = ""
    """The `RankView.key` of the selected rank."""
    scroll: int = 0
    """Of the newest lines of a log or of the events, how many are left out."""
    log: Sequence[str] = ()
    """Of the selected rank."""
    failure: str = ""
    """Why there is no newer view; empty if there is."""
    is_stopped: bool = False
    played: Played | None = None
    wanted: str | None = None
    """The run that was asked for."""
    waited: float = 0.0
    """Seconds since the first look."""
    signs: Signs = UNICODE

    @property
    def index(self) -> int:
        """Where the selected rank is in the view."""
        ranks = self.view.ranks if self.view is not None else ()
        return next((index for index, rank in enumerate(ranks) if rank.key == self.selected), 0)
