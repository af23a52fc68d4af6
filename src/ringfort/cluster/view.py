"""`PeerView`: what this process knows about one peer, for display."""

from __future__ import annotations

from dataclasses import dataclass

from ringfort.cluster.core.health import HealthStatus
from ringfort.cluster.core.link_kinds import LinkKind


@dataclass(frozen=True, kw_only=True)
class PeerView:
    """One peer at one moment. For this process itself, `address` is the first one that it listens on."""

    peer: str
    """Its id, `node.instance`."""
    name: str = ""
    """The host's name, as reported by the peer."""
    host: str = ""
    """Identifies the machine; peers of one machine have the same."""
    address: str = ""
    """The address of the fastest measured path to it, or else of its control link, as `host:port`."""
    interface: str = ""
    """The interface of this machine that the link uses; empty if unknown."""
    kind: LinkKind = LinkKind.UNKNOWN
    """What the link goes over, such as Wi-Fi."""
    round_trip: float | None = None
    """Seconds, smoothed; None before the first answer."""
    bandwidth: float | None = None
    """The median of the recent measurements, in bytes per second of the slower direction; None before the first."""
    bandwidth_range: tuple[float, float] | None = None
    """The minimum and maximum of the recent measurements."""
    health: HealthStatus = HealthStatus.UNKNOWN
    """Its health, as this process sees it."""
    is_busy: bool = False
    """Its program runs but does not respond, so its `health` is degraded."""
    is_self: bool = False
    """Whether it is this process."""
    is_leader: bool = False
    """Whether it leads its epoch."""
    is_member: bool = False
    """Whether it is in an epoch. Each run has epochs of its own."""
    version: str = ""
    """Its version of Ringfort, as reported by the peer."""
    run: str = ""
    """The run it belongs to: the `--name` of `ringfort run`; empty for a program that joined by itself."""
    slots: int = 1
    """How many ranks it has or asks for; 0 for an observer."""
    is_witness: bool = False
    """It votes in its run and has no rank (`ringfort witness`)."""
    ranks: tuple[int, ...] = ()
    """Its ranks in its epoch; empty if it is in none."""
    program: str = ""
    """The program it runs, as reported by the peer; empty before that."""
    step: int = 0
    """Training steps it has done, as reported by the peer; 0 if unknown."""
    uptime: float | None = None
    """Seconds since it joined the cluster."""
    accelerators: tuple[str, ...] = ()
    """Its GPUs, as reported by the peer."""

    @property
    def role(self) -> str:
        """Its role: leader, member, waiting, witness, or observer."""
        if self.slots == 0:
            return "witness" if self.is_witness else "observer"
        return "leader" if self.is_leader else "member" if self.is_member else "waiting"
