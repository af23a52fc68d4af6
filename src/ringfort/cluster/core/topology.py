"""The machines of a cluster, the measured speed of their links, and the ring order that follows from them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.peer_messages import Text
from ringfort.cluster.core.ring_order import best_ring
from ringfort.config import MIB
from ringfort.errors import InvalidArgumentError

STALE_AFTER: Final = 60.0
"""Seconds without a message after which a node is forgotten."""
_TYPICAL_BYTES: Final = MIB
"""Links are compared by the time for one message of this size: a ring step moves a slice of a gradient bucket."""
_COST_STEP: Final = 1.25
"""Costs are rounded to powers of this, so that the usual variation of measurements does not change the ring."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**60)]


@dataclass(frozen=True)
class Accelerator:
    """One GPU, discrete or integrated."""

    name: Text
    memory: Count = 0
    """Bytes; 0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class NodeProfile:
    """A peer's machine, as the peer describes it: for display and planning, never for trust.

    It travels in messages, so the decoder enforces the limits in the annotations.
    """

    peer: Text
    """The peer's id."""
    host: Text = ""
    """Identifies the machine; peers of one machine have the same. If empty, the peer counts as a machine of its own."""
    name: Text = ""
    """The host's name."""
    platform: Text = ""
    """System and processor, such as `Linux x86_64`."""
    cores: Count = 1
    """Cores that the process may use."""
    memory: Count = 0
    """Bytes of main memory."""
    accelerators: Annotated[tuple[Accelerator, ...], msgspec.Meta(max_length=64)] = ()
    version: Text = ""
    """Ringfort's version."""
    program: Text = ""
    """The program that the peer runs."""
    started: float | None = None
    """When the peer joined the cluster, by this process's clock."""

    @property
    def accelerator_memory(self) -> int:
        """Total memory of all accelerators, in bytes."""
        return sum(accelerator.memory for accelerator in self.accelerators)


@dataclass(frozen=True, kw_only=True)
class ConnectionProfile:
    """The properties of a link, seen from one of its ends."""

    kind: LinkKind = LinkKind.UNKNOWN
    latency: float | None = None
    """Seconds one way (half a round trip); None until measured."""
    bandwidth_out: float | None = None
    """Bytes per second from this end to the other; None until measured."""
    bandwidth_in: float | None = None
    """Bytes per second from the other end to this one; None until measured."""

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth_out", "bandwidth_in"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidArgumentError(name, value, "must be a positive, finite number, or None")

    @property
    def reversed(self) -> ConnectionProfile:
        """The same link seen from the other end."""
        return ConnectionProfile(
            kind=self.kind, latency=self.latency, bandwidth_out=self.bandwidth_in, bandwidth_in=self.bandwidth_out
        )

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the slower direction, or the nominal value of the link's kind if neither was measured."""
        measured = [value for value in (self.bandwidth_out, self.bandwidth_in) if value is not None]
        return min(measured, default=self.kind.nominal_bandwidth)

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that a message of `nbytes` bytes takes."""
        return (self.kind.nominal_latency if self.latency is None else self.latency) + nbytes / self.bandwidth


_UNKNOWN: Final = ConnectionProfile()
_SAME_HOST: Final = ConnectionProfile(kind=LinkKind.SHARED_MEMORY)


@dataclass(frozen=True)
class TopologyRecords:
    """A topology as plain values, for messages."""

    nodes: list[tuple[NodeProfile, float]]
    """Each node, and when it was last heard from."""
    links: list[tuple[str, str, ConnectionProfile]]


class ClusterTopology:
    """A graph of peers and measured links. Not thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[NodeProfile, float]] = {}
        """Each node, and when it was last heard from."""
        self._links: dict[tuple[str, str], ConnectionProfile] = {}
        """By pair of ids, lower id first; each link as seen from the lower id."""

    def copy(self) -> ClusterTopology:
        """Return an independent copy."""
        return self.from_records(self.records)

    @property
    def records(self) -> TopologyRecords:
        """The whole topology as plain values."""
        links = [(one, two, link) for (one, two), link in self._links.items()]
        return TopologyRecords(list(self._nodes.values()), links)

    @classmethod
    def from_records(cls, records: TopologyRecords) -> ClusterTopology:
        """Return the topology that `records` was taken from."""
        made = cls()
        for node, seen in records.nodes:
            made.add(node, seen)
        for one, two, link in records.links:
            made.connect(one, two, link)
        return made

    def add(self, node: NodeProfile, now: float) -> None:
        """Add a node, or replace its profile."""
        self._nodes[node.peer] = (node, now)

    def touch(self, peer: str, now: float) -> None:
        """Note that `peer` was heard from. Unknown peers are ignored."""
        if peer in self._nodes:
            node, seen = self._nodes[peer]
            self._nodes[peer] = (node, max(now, seen))

    def connect(self, peer: str, other: str, link: ConnectionProfile) -> None:
        """Set what `peer` measured of its link to `other`. Both must be nodes of this topology."""
        for name, value in (("peer", peer), ("other", other)):
            if value not in self._nodes:
                raise InvalidArgumentError(name, value, "is not a node of this topology; add its profile first")
        if peer == other:
            raise InvalidArgumentError("other", other, "a peer has no link to itself")
        self._links[min(peer, other), max(peer, other)] = link if peer < other else link.reversed

    def remove(self, peer: str) -> None:
        """Forget a node and its links. Unknown peers are ignored."""
        self._nodes.pop(peer, None)
        self._links = {ends: link for ends, link in self._links.items() if peer not in ends}

    def prune(self, now: float, stale_after: float = STALE_AFTER) -> list[str]:
        """Forget the nodes that were not heard from for `stale_after` seconds. Return their ids, sorted."""
        stale = sorted(peer for peer, (_, seen) in self._nodes.items() if now - seen > stale_after)
        for peer in stale:
            self.remove(peer)
        return stale

    @property
    def nodes(self) -> Mapping[str, NodeProfile]:
        """The profiles by peer id, sorted."""
        return {peer: node for peer, (node, _) in sorted(self._nodes.items())}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, peer: object) -> bool:
        return peer in self._nodes

    def links(self) -> Iterator[tuple[str, str, ConnectionProfile]]:
        """Yield every measured link once, seen from the lower id."""
        for peer, other in sorted(self._links):
            yield peer, other, self._links[peer, other]

    def link(self, peer: str, other: str) -> ConnectionProfile:
        """Return the link as seen from `peer`; an estimate if nothing was measured."""
        known = self._links.get((min(peer, other), max(peer, other)))
        if known is not None:
            return known if peer < other else known.reversed
        return _SAME_HOST if self._host(peer) == self._host(other) else _UNKNOWN

    def ring_order(self, peers: Iterable[str] | None = None) -> tuple[str, ...]:
        """Return `peers` (default: all nodes) in the ring order whose slowest link is fastest.

        Peers of one host are adjacent and sorted by id, so the ring enters and leaves each machine once. Unknown links
        count as slow. The result does not depend on the order in which the measurements arrived.
        """
        hosts: dict[str, list[str]] = {}
        for peer in sorted(set(self._nodes if peers is None else peers)):
            hosts.setdefault(self._host(peer), []).append(peer)
        groups = sorted(hosts.values())
        costs = [[0.0 if a is b else self._cost(a, b) for b in groups] for a in groups]
        return tuple(peer for place in best_ring(costs) for peer in groups[place])

    def neighbours(self, peer: str) -> tuple[str, str]:
        """Return the peers before and after `peer` in the ring of all nodes."""
        order = self.ring_order()
        if peer not in order:
            raise InvalidArgumentError("peer", peer, "is not a node of this topology")
        place = order.index(peer)
        return order[place - 1], order[(place + 1) % len(order)]

    def slowest_link(self, order: Sequence[str]) -> tuple[str, str, ConnectionProfile] | None:
        """Return the slowest link of a ring in this order; None for a ring of one."""
        ends = [(a, b) for a, b in zip(order, (*order[1:], *order[:1]), strict=True) if a != b]
        if not ends:
            return None
        peer, other = max(ends, key=lambda pair: self.link(*pair).seconds(_TYPICAL_BYTES))
        return peer, other, self.link(peer, other)

    def _host(self, peer: str) -> str:
        return (peer in self._nodes and self._nodes[peer][0].host) or f"\0{peer}"

    def _cost(self, one: Sequence[str], two: Sequence[str]) -> float:
        """Compare two hosts by the best link between any of their peers, because noise only makes links slower."""
        seconds = min(self.link(a, b).seconds(_TYPICAL_BYTES) for a in one for b in two)
        return float(round(math.log(seconds, _COST_STEP)))
