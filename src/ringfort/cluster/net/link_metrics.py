"""`LinkMetrics`: the measured speed of the cluster's links, the machines at their ends, and the ring order that
follows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from ringfort.cluster.core.gossip import LinkReport, MachineReport
from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.peer import PeerCore
from ringfort.cluster.core.peer_messages import Hello, Member
from ringfort.cluster.core.topology import ClusterTopology, ConnectionProfile, NodeProfile
from ringfort.cluster.net.connector import PeerConnector, key_of
from ringfort.cluster.net.host import clock
from ringfort.cluster.net.probing import Measurement

MEASURE_AFTER: Final = 0.2
"""Seconds between a link coming up and its measurement: agreeing on an epoch comes first."""
OBSERVER_PROBES: Final = 3
"""Extra measurements by an observer, which shows people the range of the results."""
OBSERVER_PAUSE: Final = 0.4
"""Seconds between two of them."""
KEPT: Final = 5
"""Measurements of a path that its range covers."""


@dataclass
class _Path:
    """The fastest path to a peer."""

    address: str
    latest: Measurement
    bandwidths: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))


class LinkMetrics:
    """Keeps the topology up to date with this peer's measurements and the reports of the others."""

    def __init__(self, own: NodeProfile, core: PeerCore, connector: PeerConnector) -> None:
        self.topology = ClusterTopology()
        self.own = own
        self._core = core
        self._connector = connector
        self._paths: dict[str, _Path] = {}

    def describe(self, own: NodeProfile) -> None:
        """Set the profile of this machine."""
        self.own = own
        self.topology.add(own, clock())

    # --- measuring --------------------------------------------------------------------------------------------------

    async def measure(self, peer: str) -> None:
        """Measure all paths to a peer that has just connected."""
        await asyncio.sleep(MEASURE_AFTER)
        if self._is_linked(peer):
            await self._connector.measure_ways(peer)

    async def measure_range(self, peer: str) -> None:
        """Measure the path to `peer` a few more times, to learn how much its speed varies."""
        for _ in range(OBSERVER_PROBES):
            await asyncio.sleep(OBSERVER_PAUSE)
            known = self._connector.directory.addresses(key_of(peer))
            if self._is_linked(peer) and known:
                await self._connector.measure(known[0])

    def add(self, found: Measurement, address: str) -> bool:
        """Take the result of a probe. Return False if a faster path to that peer is known."""
        path, interface_at = self._paths.get(found.peer), self._connector.choice.interface_at
        if path is None or interface_at(path.address) != interface_at(address):
            if path is not None and path.latest.bandwidth >= found.bandwidth:
                return False
            path = self._paths[found.peer] = _Path(address, found)
        path.address, path.latest = address, found
        path.bandwidths.append(found.bandwidth)
        if found.peer in self.topology:
            self.topology.connect(self.own.peer, found.peer, self._profile(found.peer))
        return True

    def forget(self, peer: str) -> None:
        """Drop the measurements of `peer`."""
        self._paths.pop(peer, None)

    def forget_all(self) -> None:
        """Drop all measurements: the network has changed."""
        self._paths.clear()

    # --- gossip -----------------------------------------------------------------------------------------------------

    def link_report(self) -> LinkReport:
        """Return what this peer has measured of its present links."""
        return LinkReport({peer: self._profile(peer) for peer in self._paths if self._is_linked(peer)})

    def on_machine_report(self, hello: Hello, report: MachineReport, now: float) -> None:
        """Take the profile of another peer's machine."""
        self.topology.add(report.read(hello, now), now)
        self._refresh(now)

    def on_link_report(self, peer: str, report: LinkReport) -> None:
        """Take another peer's measurements. It is believed about its own links, but not about those to this peer."""
        for other, link in report.links.items():
            if peer in self.topology and other in self.topology and len({self.own.peer, peer, other}) == 3:
                self.topology.connect(peer, other, link)

    # --- results ----------------------------------------------------------------------------------------------------

    def address(self, peer: str) -> str:
        """Return the address of the fastest measured path to `peer`; empty if none was measured."""
        path = self._paths.get(peer)
        return "" if path is None else path.address

    def bandwidths(self, peer: str) -> tuple[float, float, float] | None:
        """Return the minimum, median and maximum of the recent measurements of the path to `peer`."""
        path = self._paths.get(peer)
        return None if path is None else (min(path.bandwidths), median(path.bandwidths), max(path.bandwidths))

    def node(self, peer: str) -> NodeProfile:
        """Return the profile of the machine of `peer`; blank if it has not been reported."""
        return self.topology.nodes.get(peer, NodeProfile(peer=peer))

    def current_topology(self) -> ClusterTopology:
        """Return the topology, brought up to date."""
        self._refresh(clock())
        return self.topology

    def ring_order(self, members: Sequence[Member]) -> tuple[int, ...]:
        """Return the order in which a ring should visit `members`, as indices."""
        places = {member.peer: place for place, member in enumerate(members)}
        now = clock()
        for member in members:
            if member.peer in self.topology:
                self.topology.touch(member.peer, now)
            else:
                self.topology.add(NodeProfile(peer=member.peer, host=member.host), now)
        return tuple(places[peer] for peer in self.topology.ring_order(places))

    def _is_linked(self, peer: str) -> bool:
        return self._core.contacts.get(peer) is not None

    def _refresh(self, now: float) -> None:
        """Forget peers that have been gone for long, and update this peer's own links."""
        present = [contact.peer for contact in self._core.contacts]
        for peer in (self.own.peer, *present):
            self.topology.touch(peer, now)
        self.topology.prune(now)
        for peer in present:
            if peer in self._paths and peer in self.topology:
                self.topology.connect(self.own.peer, peer, self._profile(peer))

    def _profile(self, peer: str) -> ConnectionProfile:
        path = self._paths[peer]
        interface = self._connector.choice.interface_at(path.address)
        round_trip = self._core.health.round_trip(peer)
        return ConnectionProfile(
            kind=LinkKind.UNKNOWN if interface is None else interface.kind,
            latency=round_trip / 2 if round_trip else None,
            bandwidth_out=path.latest.bandwidth_out,
            bandwidth_in=path.latest.bandwidth_in,
        )
