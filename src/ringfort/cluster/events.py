"""What a peer tells the program about its cluster: one small class an event. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringfort.cluster.messages import Epoch
from ringfort.cluster.strangers import HOW_TO_JOIN, other_clusters


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
    """A peer is gone. `died`: it left or its process ended, so it is at work nowhere; else contact was lost."""

    peer: str
    why: str
    died: bool

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
            f"{self.peer} has the key of a node on another machine ({self.other_host}, not {self.host}) and "
            "was refused; remove the copied node_keypair there, it will get a new one"
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
        return f"{other_clusters(self.machines)}.\n  If they should be one cluster: {HOW_TO_JOIN}"


@dataclass(frozen=True)
class Noted(ClusterEvent):
    """The program of another peer tells ours something (`ClusterNode.tell`)."""

    peer: str
    topic: str
    body: bytes

    def __str__(self) -> str:
        return f"{self.peer} tells {self.topic}"
