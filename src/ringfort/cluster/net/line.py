"""`Line`: one control link, what the node knows of it, and how much may be said there beside what cores say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ringfort.cluster.net.control_link import ControlLink
from ringfort.cluster.net.host import clock

TALK_RATE: Final = 20.0
"""Messages a second, beside the core's, that a peer may send for long."""
TALK_BURST: Final = 400.0
"""That it may send at once: a failing program's last words, from every rank."""


@dataclass
class Line:
    """One control link and what the node knows of it."""

    link: ControlLink
    address: str
    """Where this side dialled; empty where the other did."""
    where: str
    """The other end, as `host:port`."""
    peer: str = ""
    credit: float = TALK_BURST
    credit_at: float = field(default_factory=clock)

    def is_flooding(self, now: float) -> bool:
        """Counts a message that is not the core's."""
        self.credit = min(TALK_BURST, self.credit + TALK_RATE * (now - self.credit_at)) - 1
        self.credit_at = now
        return self.credit < 0
