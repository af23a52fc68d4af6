"""`Speeds`: how fast the links of the cluster are, as this peer and the others have measured, and what follows: the
order of the ring. Keeps the topology; owned by the control service."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

from ringfort.cluster.core.gossip import About, Way, Ways, connection, profile
from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.peer import PeerCore
from ringfort.cluster.core.peer_messages import Hello, Member
from ringfort.cluster.core.topology import ClusterTopology, ConnectionProfile, NodeProfile
from ringfort.cluster.net.connector import Finder, key_of
from ringfort.cluster.net.host import clock
from ringfort.cluster.net.probing import Measurement
from ringfort.cluster.net.setup import Setup

MEASURE_AFTER: Final = 0.2
"""Seconds after a link is up before it is measured: agreeing comes first."""
LOOKS: Final = 3
"""Times that an observer measures: it has nothing else to do, and people compare what it shows."""
LOOK_AGAIN: Final = 0.4
"""Seconds between two of them."""
KEPT: Final = 5
"""Measurements of a way that make up its range."""


class Speeds:
    """What is known of the links."""

    def __init__(self, setup: Setup, core: PeerCore, finder: Finder) -> None:
        self.topology = ClusterTopology()
        self.own = NodeProfile(peer=setup.peer)
        self._core = core
        self._finder = finder
        self._me = setup.peer
        self._found: dict[str, tuple[Measurement, str]] = {}
        """Of each peer the fastest way, and the address it goes to."""
        self._seen: dict[str, deque[float]] = {}
        """Of each such way the latest bandwidths."""

    def describe(self, own: NodeProfile) -> None:
        """What this machine is."""
        self.own = own
        self.topology.add(own, clock())

    async def measure(self, peer: str, address: str) -> None:
        """Measures all ways to a peer that was just met, the one that its link goes first."""
        await asyncio.sleep(MEASURE_AFTER)
        if self._core.contacts.get(peer) is not None and not self._finder.directory.is_measured(address):
            await self._finder.measure(address)
        if self._core.contacts.get(peer) is not None:
            await self._finder.measure_ways(peer)

    async def measure_again(self, peer: str) -> None:
        """Measures the way to a peer that is in use a few times more, for a range."""
        for _ in range(LOOKS):
            await asyncio.sleep(LOOK_AGAIN)
            known = self._finder.directory.addresses(key_of(peer))
            if self._core.contacts.get(peer) is not None and known:
                await self._finder.measure(known[0])

    def measured(self, found: Measurement, address: str) -> bool:
        """What a probe of a way to a peer found. False if a faster one is known."""
        known = self._found.get(found.peer)
        if known is not None and self._finder.interface_of(known[1]) != self._finder.interface_of(address):
            if known[0].bandwidth >= found.bandwidth:
                return False
            self._seen.pop(found.peer, None)
        self._seen.setdefault(found.peer, deque(maxlen=KEPT)).append(found.bandwidth)
        self._found[found.peer] = (found, address)
        if found.peer in self.topology:
            self.topology.connect(self._me, found.peer, self._profile(found.peer))
        return True

    def forget(self, peer: str | None = None) -> None:
        """The ways to `peer`, or all ways, may be others from now on."""
        if peer is None:
            self._found.clear()
            self._seen.clear()
        else:
            self._found.pop(peer, None)
            self._seen.pop(peer, None)

    def best(self, peer: str) -> tuple[str, float] | None:
        """The address of the fastest way to `peer`, and its bytes a second in the slower direction."""
        found = self._found.get(peer)
        return None if found is None else (found[1], found[0].bandwidth)

    def bandwidths(self, peer: str) -> tuple[float, float, float] | None:
        """The least, the middle and the greatest of what was measured lately of the way to `peer`."""
        seen = self._seen.get(peer)
        return (min(seen), median(seen), max(seen)) if seen else None

    def node(self, peer: str) -> NodeProfile:
        """What the machine of `peer` is, as far as it has told."""
        return self.topology.nodes.get(peer, NodeProfile(peer=peer))

    def ways(self) -> Ways:
        """All links of this peer that were measured and are there."""
        known = [peer for peer in self._found if self._core.contacts.get(peer) is not None]
        ways: list[Way] = []
        for peer in known:
            link = self._profile(peer)
            ways.append(Way(peer, link.kind, link.latency, link.bandwidth_out, link.bandwidth_in))
        return Ways(tuple(ways))

    def heard_about(self, hello: Hello, said: About, now: float) -> None:
        """A peer says what its machine is."""
        member = hello.member
        self.topology.add(profile(member.peer, member.host, hello.name, hello.version, said, now), now)
        self._refresh(now)

    def heard_ways(self, peer: str, said: Ways) -> None:
        """A peer says what it has measured. It is believed about its own links alone."""
        for way in said.ways:
            if peer in self.topology and way.peer in self.topology and len({self._me, peer, way.peer}) == 3:
                self.topology.connect(peer, way.peer, connection(way))

    def known(self) -> ClusterTopology:
        """A copy of the topology, as it is now."""
        self._refresh(clock())
        return self.topology.copy()

    def _refresh(self, now: float) -> None:
        """Forgets who has been out of sight for long, and takes over what else is known of this peer's own links."""
        present = [contact.peer for contact in self._core.contacts]
        for peer in (self._me, *present):
            self.topology.touch(peer, now)
        self.topology.prune(now)
        for peer in present:
            if peer in self._found and peer in self.topology:
                self.topology.connect(self._me, peer, self._profile(peer))

    def ring_order(self, members: Sequence[Member]) -> tuple[int, ...]:
        """The order in which a ring should visit `members`, as indices."""
        places = {member.peer: place for place, member in enumerate(members)}
        now = clock()
        for member in members:
            if member.peer in self.topology:
                self.topology.touch(member.peer, now)
            else:
                self.topology.add(NodeProfile(peer=member.peer, host=member.host), now)
        return tuple(places[peer] for peer in self.topology.ring_order(places))

    def _profile(self, peer: str) -> ConnectionProfile:
        found, address = self._found[peer]
        interface = self._finder.interface_of(address)
        round_trip = self._core.health.round_trip(peer)
        return ConnectionProfile(
            kind=LinkKind.UNKNOWN if interface is None else interface.kind,
            latency=round_trip / 2 if round_trip else None,
            bandwidth_out=found.bandwidth_out,
            bandwidth_in=found.bandwidth_in,
        )
