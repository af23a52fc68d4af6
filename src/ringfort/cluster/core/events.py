"""What a `PeerCore` gives to the node around it: instructions, and events to publish to the program. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ringfort.cluster.core.other_clusters import HOW_TO_JOIN, describe_other_clusters
from ringfort.cluster.core.peer_messages import AnyMessage, Epoch, Votes


@dataclass(frozen=True)
class ClusterEvent:
    """Base class of all events. `str()` gives a sentence for people."""

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class PeerJoined(ClusterEvent):
    """A peer has connected and proved who it is."""

    peer: str
    name: str = ""
    version: str = ""
    """Its version of Ringfort."""

    def __str__(self) -> str:
        return f"{self.name or self.peer} is here"


@dataclass(frozen=True)
class PeerLost(ClusterEvent):
    """A peer is gone. `died`: its process has certainly ended; otherwise, only contact was lost. `left`: it closed its
    node, so it has sent everything it had to send."""

    peer: str
    why: str
    died: bool
    left: bool = False

    def __str__(self) -> str:
        return f"{self.peer} is {'gone' if self.died else 'out of reach'}: {self.why}"


@dataclass(frozen=True)
class EpochStarted(ClusterEvent):
    """An epoch with this peer is committed: all members have accepted it."""

    epoch: Epoch

    def __str__(self) -> str:
        return f"{self.epoch} has started: {', '.join(self.epoch.peers)}"


@dataclass(frozen=True)
class EpochEnded(ClusterEvent):
    """This peer is no longer in `epoch`, so abort what waits in it. The next epoch, if any, is not agreed on yet."""

    epoch: Epoch
    why: str

    def __str__(self) -> str:
        return f"{self.epoch} has ended: {self.why}"


@dataclass(frozen=True)
class Waiting(ClusterEvent):
    """This peer cannot be in an epoch now; `why` says what it waits for."""

    why: str

    def __str__(self) -> str:
        return f"waiting: {self.why}"


@dataclass(frozen=True)
class CloneFound(ClusterEvent):
    """Two machines use one identity because a key was copied. The second machine is refused."""

    peer: str
    host: str
    other_host: str

    def __str__(self) -> str:
        return (
            f"{self.peer} on machine {self.other_host} has the key of another machine ({self.host}) and was refused. "
            "If its home was copied: rm ~/.ringfort/node_keypair there, and it gets a new key. "
            "If two containers share a home: set RINGFORT_HOME to a different folder in each"
        )


@dataclass(frozen=True)
class Misbehaved(ClusterEvent):
    """A peer has broken the protocol. Its link was closed, and it is refused for a while."""

    peer: str
    why: str

    def __str__(self) -> str:
        return f"{self.peer} was refused: {self.why}"


@dataclass(frozen=True)
class ConnectionRefused(ClusterEvent):
    """Somebody has connected to this peer and was refused: it has another secret or another version, for example."""

    host: str
    why: str

    def __str__(self) -> str:
        return f"a connection from {self.host} was refused: {self.why}"


@dataclass(frozen=True)
class OtherClusters(ClusterEvent):
    """This peer waits for others, while machines of other clusters announce themselves on its network."""

    machines: tuple[str, ...]
    """An address of each."""

    def __str__(self) -> str:
        return f"{describe_other_clusters(self.machines)}.\n  If they should be one cluster: {HOW_TO_JOIN}"


@dataclass(frozen=True)
class DiskTrouble(ClusterEvent):
    """The votes of this peer cannot be written to the disk, so it joins no group. It keeps trying."""

    path: str
    why: str

    def __str__(self) -> str:
        return (
            f"cannot write {self.path}: {self.why}. This peer joins no group until it can. Free space on that disk, or "
            "set RINGFORT_HOME to a folder on another disk"
        )


@dataclass(frozen=True)
class ControlLost(ClusterEvent):
    """The control process of this node has ended, and the node with it. No events follow."""

    why: str

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True)
class Noted(ClusterEvent):
    """A note from the program of another peer (`ClusterNode.tell`)."""

    peer: str
    topic: str
    body: bytes

    def __str__(self) -> str:
        return f"note from {self.peer}: {self.topic}"


# --- instructions -----------------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send `message` on `link`."""

    link: int
    message: AnyMessage


class Close(msgspec.Struct, frozen=True):
    """Close `link` after what was sent on it before."""

    link: int
    why: str


class Learn(msgspec.Struct, frozen=True):
    """`peer` may be found at `addresses`, says the peer `introducer`."""

    peer: str
    addresses: tuple[str, ...]
    introducer: str


class Persist(msgspec.Struct, frozen=True):
    """Write `votes` to the disk, then call `PeerCore.persisted`."""

    votes: Votes


class Fence(msgspec.Struct, frozen=True):
    """Have the program of an elastic run stop for good what it does in epochs below `epoch`, and call
    `PeerCore.fenced` with where it is then. If its run is one of the lineages `ended`, that run is over: its state is
    only a checkpoint from now on."""

    epoch: int
    ended: tuple[str, ...] = ()


class Notify(msgspec.Struct, frozen=True):
    """Publish an event to the program."""

    event: ClusterEvent


Instruction = Send | Close | Learn | Persist | Fence | Notify
