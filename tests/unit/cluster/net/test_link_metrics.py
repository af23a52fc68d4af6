"""Measured links: the fastest path to each peer, what others report, and the ring order."""

from __future__ import annotations

from typing import cast

import pytest

from ringfort.cluster.core.contacts import Contact
from ringfort.cluster.core.gossip import LinkReport, MachineReport
from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.peer import PeerCore
from ringfort.cluster.core.peer_messages import Hello, Member
from ringfort.cluster.core.topology import ConnectionProfile, NodeProfile
from ringfort.cluster.discovery.interfaces import Interface
from ringfort.cluster.net.connector import PeerConnector
from ringfort.cluster.net.host import clock
from ringfort.cluster.net.link_metrics import LinkMetrics
from ringfort.cluster.net.probing import Measurement
from ringfort.config import AutoDiscoveryConfig

CABLE, RADIO = Interface(name="eth0", kind=LinkKind.ETHERNET), Interface(name="wlan0", kind=LinkKind.WIFI)
BY_CABLE, BY_RADIO = "10.0.0.2:1", "10.0.1.2:1"


class FakeConnector:
    @property
    def choice(self) -> FakeConnector:
        return self

    def interface_at(self, address: str) -> Interface | None:
        return {"10.0.0": CABLE, "10.0.1": RADIO}.get(address.rpartition(".")[0])


@pytest.fixture
def metrics() -> LinkMetrics:
    """Of the peer `me.1`, which is connected with `a.1` and `b.1`."""
    core = PeerCore(Member("me.1", "here"), AutoDiscoveryConfig(), clock())
    made = LinkMetrics(NodeProfile(peer="me.1"), core, cast("PeerConnector", FakeConnector()))
    made.describe(NodeProfile(peer="me.1", host="here"))
    for link, peer in enumerate(("a.1", "b.1"), 1):
        hello = Hello(Member(peer, f"host of {peer}"), peer)
        contact = Contact(link, "", True, 0.0)
        core.contacts.links[contact.link] = contact
        core.contacts.introduce(contact, hello)
        made.on_machine_report(hello, MachineReport(NodeProfile(peer=peer)), clock())
    return made


def test_the_fastest_path_is_kept_with_the_range_of_its_measurements(metrics: LinkMetrics) -> None:
    assert metrics.bandwidths("a.1") is None
    assert metrics.add(Measurement("a.1", 2e6, 3e6), BY_RADIO)
    assert metrics.add(Measurement("a.1", 100e6, 110e6), BY_CABLE)
    assert not metrics.add(Measurement("a.1", 50e6, 50e6), BY_RADIO)  # slower than the cable
    assert metrics.add(Measurement("a.1", 80e6, 90e6), BY_CABLE)  # the same path again
    assert metrics.add(Measurement("a.1", 120e6, 90e6), BY_CABLE)
    assert metrics.address("a.1") == BY_CABLE
    assert metrics.bandwidths("a.1") == (80e6, 90e6, 100e6)
    assert metrics.topology.link("me.1", "a.1").kind is LinkKind.ETHERNET
    metrics.forget("a.1")
    assert (metrics.address("a.1"), metrics.bandwidths("a.1")) == ("", None)


def test_only_links_of_connected_peers_are_reported(metrics: LinkMetrics) -> None:
    metrics.add(Measurement("a.1", 5e6, 4e6), BY_RADIO)
    metrics.add(Measurement("gone.1", 5e6, 4e6), BY_RADIO)
    link = ConnectionProfile(kind=LinkKind.WIFI, bandwidth_out=5e6, bandwidth_in=4e6)
    assert metrics.link_report() == LinkReport({"a.1": link})
    metrics.forget_all()
    assert metrics.link_report() == LinkReport({})


def test_a_peer_is_believed_about_its_own_links_but_not_about_ours(metrics: LinkMetrics) -> None:
    slow = ConnectionProfile(bandwidth_out=1.0, bandwidth_in=1.0)
    metrics.on_link_report("a.1", LinkReport({"b.1": slow, "me.1": slow, "a.1": slow, "unknown.1": slow}))
    assert [(one, two) for one, two, _ in metrics.current_topology().links()] == [("a.1", "b.1")]


def test_the_ring_avoids_the_slowest_link(metrics: LinkMetrics) -> None:
    members = [Member(peer, peer) for peer in ("me.1", "a.1", "b.1", "c.1")]
    fast, slow = ({"bandwidth_out": speed, "bandwidth_in": speed} for speed in (1e9, 1e5))
    metrics.ring_order(members)  # now all are known
    for one, two in (("me.1", "b.1"), ("b.1", "a.1"), ("a.1", "c.1"), ("c.1", "me.1")):
        metrics.topology.connect(one, two, ConnectionProfile(**fast))
    for one, two in (("me.1", "a.1"), ("b.1", "c.1")):
        metrics.topology.connect(one, two, ConnectionProfile(**slow))
    ring = [members[index].peer for index in metrics.ring_order(members)]
    neighbours = {frozenset((ring[place - 1], ring[place])) for place in range(4)}
    assert frozenset(("me.1", "a.1")) not in neighbours
    assert frozenset(("b.1", "c.1")) not in neighbours
