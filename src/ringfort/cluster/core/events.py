"""What a peer tells the program about its cluster: one small class an event. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringfort.cluster.core.other_clusters import HOW_TO_JOIN, describe_other_clusters
from ringfort.cluster.core.peer_messages import Epoch


@dataclass(frozen=True)
class ClusterEvent:
    """The parent of all. `str()` is a sentence for people."""

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class PeerJoined(ClusterEvent):
    """A peer has proved itself on a link."""

    peer: str
    name: str = ""
    version: str = ""
    """Of its Ringfort."""

    def __str__(self) -> str:
        return f"{self.name or self.peer} is here"


@dataclass(frozen=True)
class PeerLost(ClusterEvent):
    """A peer is gone. `died`: it left or its process ended, so it is at work nowhere; else contact was lost. `left`: it
    closed its node, so it has sent all that it had to send."""

    peer: str
    why: str
    died: bool
    left: bool = False

    def __str__(self) -> str:
        return f"{self.peer} is {'gone' if self.died else 'out of reach'}: {self.why}"


@dataclass(frozen=True)
class EpochStarted(ClusterEvent):
    """All members have agreed; this peer is one of them."""

    epoch: Epoch

    def __str__(self) -> str:
        return f"{self.epoch} has started: {', '.join(self.epoch.peers)}"


@dataclass(frozen=True)
class EpochEnded(ClusterEvent):
    """This peer is no longer in `epoch`: abort what waits in it. The next one, if any, is not agreed yet."""

    epoch: Epoch
    why: str

    def __str__(self) -> str:
        return f"{self.epoch} has ended: {self.why}"


@dataclass(frozen=True)
class Waiting(ClusterEvent):
    """This peer is in no epoch and cannot be for now; `why` says what it waits for."""

    why: str

    def __str__(self) -> str:
        return f"waiting: {self.why}"


@dataclass(frozen=True)
class CloneFound(ClusterEvent):
    """One identity on two machines: a key was copied. The second is refused."""

    peer: str
    host: str
    other_host: str

    def __str__(self) -> str:
        return (
            f"{self.peer} has the key of another machine ({self.host}) on machine {self.other_host} and was refused. "
            "If its home was copied: rm ~/.ringfort/node_keypair there, and it gets a key of its own. "
            "If two containers share a home: set RINGFORT_HOME to a folder of its own in each"
        )


@dataclass(frozen=True)
class Misbehaved(ClusterEvent):
    """A peer floods, lies or talks nonsense; its link was closed and it is ignored for a while."""

    peer: str
    why: str

    def __str__(self) -> str:
        return f"{self.peer} was refused: {self.why}"


@dataclass(frozen=True)
class OtherClusters(ClusterEvent):
    """This peer waits for others, and machines of other clusters announce themselves on its network."""

    machines: tuple[str, ...]
    """An address for each."""

    def __str__(self) -> str:
        return f"{describe_other_clusters(self.machines)}.\n  If they should be one cluster: {HOW_TO_JOIN}"


@dataclass(frozen=True)
class DiskTrouble(ClusterEvent):
    """What this peer promises cannot be written down, so it joins no group; it goes on trying."""

    path: str
    why: str

    def __str__(self) -> str:
        return (
            f"cannot write {self.path}: {self.why}. This peer joins no group until it can. Free space on that disk, or "
            "set RINGFORT_HOME to a folder on another one"
        )


@dataclass(frozen=True)
class ControlLost(ClusterEvent):
    """The control process beside this one is gone, and this node with it: nothing more will happen."""

    why: str

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True)
class Noted(ClusterEvent):
    """The program of another peer tells ours something (`ClusterNode.tell`)."""

    peer: str
    topic: str
    body: bytes

    def __str__(self) -> str:
        return f"{self.peer} tells {self.topic}"
