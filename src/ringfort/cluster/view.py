"""`PeerView`: what this process knows of one peer, for tables and for people."""

from __future__ import annotations

from dataclasses import dataclass

from ringfort.cluster.core.health import HealthStatus
from ringfort.cluster.core.link_kinds import LinkKind


@dataclass(frozen=True, kw_only=True)
class PeerView:
    """One peer at one moment, this process too (its `address` is then the first that it is found at)."""

    peer: str
    """Its id, `node.instance`."""
    name: str = ""
    """The host's name, as the peer tells it."""
    host: str = ""
    """Names the machine: peers with the same are on one."""
    address: str = ""
    """Of the fastest way to it that was measured; before that, of its control link. As `host:port`."""
    interface: str = ""
    """The interface of this machine that the link goes through; empty where that is not known."""
    kind: LinkKind = LinkKind.UNKNOWN
    round_trip: float | None = None
    """Seconds, smoothed; None before the first answer."""
    bandwidth: float | None = None
    """Bytes a second of the slower direction; None until it has been measured. The middle of what was measured."""
    bandwidth_range: tuple[float, float] | None = None
    """The least and the greatest of what was measured lately."""
    health: HealthStatus = HealthStatus.UNKNOWN
    is_busy: bool = False
    """Its program runs but does not respond, so that `health` is degraded."""
    is_self: bool = False
    is_leader: bool = False
    is_member: bool = False
    """Of an epoch. There may be one for each run."""
    version: str = ""
    run: str = ""
    """The run that it belongs to: the `--name` of `ringfort run`, empty for a program that joined by itself."""
    slots: int = 1
    ranks: tuple[int, ...] = ()
    """In its epoch; empty where it is in none."""
    program: str = ""
    """What it runs, as it tells; empty before it has."""
    step: int = 0
    """How many steps of training it has done, as it tells; 0 where that is not known."""
    uptime: float | None = None
    """Seconds for which it has been in the cluster."""
    accelerators: tuple[str, ...] = ()

    @property
    def role(self) -> str:
        """In one word: leader, member, waiting, or observer."""
        if self.slots == 0:
            return "observer"
        return "leader" if self.is_leader else "member" if self.is_member else "waiting"
