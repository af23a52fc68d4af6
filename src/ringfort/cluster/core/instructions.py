"""What a `PeerCore` asks the node around it to do. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringfort.cluster.core.events import ClusterEvent
from ringfort.cluster.core.peer_messages import AnyMessage, Votes


@dataclass(frozen=True)
class Send:
    """Send `message` on `link`."""

    link: int
    message: AnyMessage


@dataclass(frozen=True)
class Close:
    """Close `link` after what was sent on it before."""

    link: int
    why: str


@dataclass(frozen=True)
class Learn:
    """`peer` may be found at `addresses`, says the peer `introducer`."""

    peer: str
    addresses: tuple[str, ...]
    introducer: str


@dataclass(frozen=True)
class Persist:
    """Write `votes` to the disk, then call `PeerCore.persisted`."""

    votes: Votes


@dataclass(frozen=True)
class Notify:
    """Publish an event to the program."""

    event: ClusterEvent


Instruction = Send | Close | Learn | Persist | Notify
