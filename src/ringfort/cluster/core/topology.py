"""Who is in a cluster and how fast the links between them are, as measured; and the ring order that follows. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.ring_order import best_ring
from ringfort.config import MIB
from ringfort.errors import InvalidArgumentError

STALE_AFTER: Final = 60.0
"""Seconds without a word after which a node is forgotten."""
_TYPICAL_BYTES: Final = MIB
"""What a link is judged by: the time for one such message. A ring step moves a slice of a gradient bucket."""
_COST_STEP: Final = 1.25
"""Costs are rounded to powers of this: measurements vary by as much, and the ring should not with them."""


@dataclass(frozen=True)
class Accelerator:
    """One GPU, or a chip's own."""

    name: str
    memory: int = 0
    """Bytes; 0 where it is not known."""


@dataclass(frozen=True, kw_only=True)
class NodeProfile:
    """What a peer's machine is. Told by the peer itself: for people and for planning, never for trust."""

    peer: str
    """The peer's id."""
    host: str = ""
    """Names the machine: peers with the same are on one. Empty if it is not known, and then it is its own."""
    name: str = ""
    """The host's name, for people."""
    platform: str = ""
    """System and processor, such as `Linux x86_64`."""
    cores: int = 1
    """That this process may use."""
    memory: int = 0
    """Bytes that the machine has."""
    accelerators: tuple[Accelerator, ...] = ()
    version: str = ""
    """Ringfort's."""
    program: str = ""
    """What the peer runs."""
    started: float | None = None
    """When, by this process's clock."""

    @property
    def accelerator_memory(self) -> int:
        """Bytes of all accelerators together."""
        return sum(accelerator.memory for accelerator in self.accelerators)


@dataclass(frozen=True, kw_only=True)
class ConnectionProfile:
    """What a link is like, seen from one of its ends."""

    kind: LinkKind = LinkKind.UNKNOWN
    latency: float | None = None
    """Seconds one way, half a round trip; None until it has been measured."""
    bandwidth_out: float | None = None
    """Bytes a second from this end to the other; None until it has been measured."""
    bandwidth_in: float | None = None
    """Bytes a second from the other end to this."""

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
        """Of the slower direction, in bytes a second; where neither was measured, what its kind usually has.

        In a ring data comes in by one link and goes out by another. A radio that is slow one way is slow in either.
        """
        measured = [value for value in (self.bandwidth_out, self.bandwidth_in) if value is not None]
        return min(measured, default=self.kind.nominal_bandwidth)

    def seconds(self, nbytes: int) -> float:
        """For a message of so many bytes."""
        return (self.kind.nominal_latency if self.latency is None else self.latency) + nbytes / self.bandwidth


_UNKNOWN: Final = ConnectionProfile()
_SAME_HOST: Final = ConnectionProfile(kind=LinkKind.SHARED_MEMORY)


@dataclass(frozen=True)
class TopologyRecords:
    """A topology as plain values, for messages."""

    nodes: list[tuple[NodeProfile, float]]
    """With when each was last heard."""
    links: list[tuple[str, str, ConnectionProfile]]


class ClusterTopology:
    """A graph of peers and measured links. Not thread-safe: it belongs to the loop that feeds it."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeProfile] = {}
        self._seen: dict[str, float] = {}
        self._links: dict[tuple[str, str], ConnectionProfile] = {}
        """Under the lower id first, and seen from there."""

    def copy(self) -> ClusterTopology:
        """Another that is the same now."""
        other = ClusterTopology()
        other._nodes, other._seen, other._links = dict(self._nodes), dict(self._seen), dict(self._links)
        return other

    @property
    def records(self) -> TopologyRecords:
        """All of it, as plain values."""
        seen = [(node, self._seen[peer]) for peer, node in self._nodes.items()]
        return TopologyRecords(seen, [(one, two, link) for (one, two), link in self._links.items()])

    @classmethod
    def from_records(cls, records: TopologyRecords) -> ClusterTopology:
        """The topology that `records` were taken of."""
        made = cls()
        for node, seen in records.nodes:
            made.add(node, seen)
        for one, two, link in records.links:
            made.connect(one, two, link)
        return made

    def add(self, node: NodeProfile, now: float) -> None:
        """Add a node, or replace what is known of it."""
        self._nodes[node.peer] = node
        self._seen[node.peer] = now

    def touch(self, peer: str, now: float) -> None:
        """`peer` was heard. Unknown ones are ignored: its profile has not come yet."""
        if peer in self._seen:
            self._seen[peer] = max(now, self._seen[peer])

    def connect(self, peer: str, other: str, link: ConnectionProfile) -> None:
        """What `peer` measured of its link to `other`; it replaces what was known. Both must be nodes."""
        for name, value in (("peer", peer), ("other", other)):
            if value not in self._nodes:
                raise InvalidArgumentError(name, value, "is no node of this topology; add its profile first")
        if peer == other:
            raise InvalidArgumentError("other", other, "a peer has no link to itself")
        self._links[min(peer, other), max(peer, other)] = link if peer < other else link.reversed

    def remove(self, peer: str) -> None:
        """Forget a node and its links. One that is not there is none."""
        self._nodes.pop(peer, None)
        self._seen.pop(peer, None)
        self._links = {ends: link for ends, link in self._links.items() if peer not in ends}

    def prune(self, now: float, stale_after: float = STALE_AFTER) -> list[str]:
        """Forget the nodes that were not heard for `stale_after` seconds; returns their ids, in order."""
        stale = sorted(peer for peer, seen in self._seen.items() if now - seen > stale_after)
        for peer in stale:
            self.remove(peer)
        return stale

    @property
    def nodes(self) -> Mapping[str, NodeProfile]:
        """By peer id."""
        return dict(sorted(self._nodes.items()))

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, peer: object) -> bool:
        return peer in self._nodes

    def links(self) -> Iterator[tuple[str, str, ConnectionProfile]]:
        """Every link that was measured, once, seen from the lower id."""
        for (peer, other), link in sorted(self._links.items(), key=lambda item: item[0]):
            yield peer, other, link

    def link(self, peer: str, other: str) -> ConnectionProfile:
        """The link seen from `peer`; where nothing was measured, what is to be expected."""
        known = self._links.get((min(peer, other), max(peer, other)))
        if known is not None:
            return known if peer < other else known.reversed
        return _SAME_HOST if self._host(peer) == self._host(other) else _UNKNOWN

    def ring_order(self, peers: Iterable[str] | None = None) -> tuple[str, ...]:
        """The peers in the order a ring should visit them, by the slowest link that it contains; all by default.

        Peers of one host follow each other, so that the ring enters and leaves a machine once; within it they are in
        the order of their ids. What is not known of a peer or a link counts as slow. The result depends on what is
        known alone, not on the order in which it became known.
        """
        hosts: dict[str, list[str]] = {}
        for peer in sorted(set(self._nodes if peers is None else peers)):
            hosts.setdefault(self._host(peer), []).append(peer)
        groups = sorted(hosts.values())
        costs = [[0.0 if a is b else self._cost(a, b) for b in groups] for a in groups]
        return tuple(peer for place in best_ring(costs) for peer in groups[place])

    def neighbours(self, peer: str) -> tuple[str, str]:
        """Who sends to `peer` in the ring of all, and to whom it sends."""
        order = self.ring_order()
        if peer not in order:
            raise InvalidArgumentError("peer", peer, "is no node of this topology")
        place = order.index(peer)
        return order[place - 1], order[(place + 1) % len(order)]

    def slowest_link(self, order: Sequence[str]) -> tuple[str, str, ConnectionProfile] | None:
        """The link that sets the pace of a ring in this order; None for a ring of one."""
        ends = [(a, b) for a, b in zip(order, (*order[1:], *order[:1]), strict=True) if a != b]
        if not ends:
            return None
        peer, other = max(ends, key=lambda pair: self.link(*pair).seconds(_TYPICAL_BYTES))
        return peer, other, self.link(peer, other)

    def _host(self, peer: str) -> str:
        node = self._nodes.get(peer)
        return node.host if node is not None and node.host else f"\0{peer}"

    def _cost(self, one: Sequence[str], two: Sequence[str]) -> float:
        """Between two hosts: the best that was measured between any of their peers, since noise only slows."""
        seconds = min(self.link(a, b).seconds(_TYPICAL_BYTES) for a in one for b in two)
        return float(round(math.log(seconds, _COST_STEP)))
