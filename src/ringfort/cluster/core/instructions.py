"""What a peer's core asks of the node around it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringfort.cluster.core.events import ClusterEvent
from ringfort.cluster.core.peer_messages import AnyMessage, Standing


@dataclass(frozen=True)
class Send:
    """Send `message` on `link`."""

    link: int
    message: AnyMessage


@dataclass(frozen=True)
class Close:
    """Close `link`."""

    link: int
    why: str


@dataclass(frozen=True)
class Learn:
    """`peer` may be found at `addresses`."""

    peer: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Remember:
    """Write `standing` to the disk, and tell the core with `remembered` that it is there or why not."""

    standing: Standing


@dataclass(frozen=True)
class Notify:
    """Tell the program."""

    event: ClusterEvent


Instruction = Send | Close | Learn | Remember | Notify
