"""`Known`: all that a viewer knows. Everything reaches it in frames, whether it just happened or was recorded: so a
recording shows what its viewer saw. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from ringfort.dashboard.output import RankOutput
from ringfort.telemetry.history import History
from ringfort.telemetry.report import Report
from ringfort.telemetry.view import LinkView, ShownEvent
from ringfort.telemetry.watching import LogPart

MAX_OUTPUTS: Final = 32
"""Ranks whose output is kept."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Base class of what a viewer learns."""


class Reported(Frame, frozen=True, tag=1):
    """A rank has reported."""

    report: Report


class Ended(Frame, frozen=True, tag=2):
    """A process has certainly ended."""

    host: str
    pid: int
    left: bool = False
    """Whether its peer has said goodbye before."""


class Unreadable(Frame, frozen=True, tag=3):
    """A machine sends what cannot be understood."""

    host: str
    name: str


class Linked(Frame, frozen=True, tag=4):
    """What is known of the links between machines."""

    links: tuple[LinkView, ...]


class Happened(Frame, frozen=True, tag=5):
    """The viewer has noticed something itself."""

    event: ShownEvent


class Printed(Frame, frozen=True, tag=6):
    """A rank has printed something."""

    run: str
    part: LogPart


class Over(Frame, frozen=True, tag=7):
    """The recording ends here."""


AnyFrame = Reported | Ended | Unreadable | Linked | Happened | Printed | Over


class Known:
    """A `History`, and the output of ranks. For one thread at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.history = History(clock)
        self._outputs: OrderedDict[tuple[str, int], RankOutput] = OrderedDict()

    def take(self, frame: AnyFrame, at: float) -> None:
        """Take what was learned at the time `at`, by the viewer's clock."""
        match frame:
            case Reported(report=report):
                self.history.take(report, at)
            case Ended(host=host, pid=pid, left=left):
                self.history.lost(host, pid, left=left)
            case Unreadable(host=host, name=name):
                self.history.nonsense(host, name)
            case Linked(links=links):
                self.history.set_links(links)
            case Happened(event=event):
                self.history.add_event(event)
            case Printed(run=run, part=part):
                self.output(run, part.rank).add(part)
            case Over():
                pass

    def output(self, run: str, rank: int) -> RankOutput:
        """Return the output of a rank. Of the ranks that were not asked for recently, it is forgotten."""
        found = self._outputs.setdefault((run, rank), RankOutput())
        self._outputs.move_to_end((run, rank))
        while len(self._outputs) > MAX_OUTPUTS:
            self._outputs.popitem(last=False)
        return found
