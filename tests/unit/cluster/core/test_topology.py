"""Nodes, measured links and the ring that follows from them."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.topology import Accelerator, ClusterTopology, ConnectionProfile, NodeProfile
from ringfort.config import MIB
from ringfort.errors import InvalidArgumentError

GIGABIT = ConnectionProfile(kind=LinkKind.ETHERNET, latency=1e-4, bandwidth_out=117e6, bandwidth_in=117e6)
SLOW = ConnectionProfile(kind=LinkKind.WIFI, latency=3e-3, bandwidth_out=6e6, bandwidth_in=6e6)


def topology(*peers: str, hosts: dict[str, str] | None = None) -> ClusterTopology:
    made = ClusterTopology()
    for peer in peers:
        made.add(NodeProfile(peer=peer, host=(hosts or {}).get(peer, "")), 0.0)
    return made


def test_the_ring_avoids_the_slow_link() -> None:
    net = topology("a", "b", "c", "d")
    for peer, other in itertools.combinations("abcd", 2):
        net.connect(peer, other, SLOW if {peer, other} == {"a", "b"} else GIGABIT)
    order = net.ring_order()
    assert order == ("a", "c", "b", "d")
    slowest = net.slowest_link(order)
    assert slowest is not None
    assert slowest[2] == GIGABIT


def test_a_link_that_is_slow_one_way_counts_as_slow() -> None:
    net = topology("a", "b", "c", "d")
    for peer, other in itertools.combinations("abcd", 2):
        net.connect(peer, other, GIGABIT)
    net.connect("b", "a", ConnectionProfile(latency=1e-4, bandwidth_out=5e6, bandwidth_in=117e6))
    assert net.link("a", "b").bandwidth_in == 5e6
    assert net.link("b", "a").bandwidth_out == 5e6
    assert net.ring_order() == ("a", "c", "b", "d")


def test_peers_of_one_host_follow_each_other() -> None:
    hosts = {"a": "two", "b": "one", "c": "two", "d": "one", "e": "three"}
    net = topology(*hosts, hosts=hosts)
    order = net.ring_order()
    visits = [host for host, _ in itertools.groupby(hosts[peer] for peer in order)]
    assert sorted(visits) == ["one", "three", "two"]
    assert net.link("a", "c").kind is LinkKind.SHARED_MEMORY
    assert net.link("a", "b").kind is LinkKind.UNKNOWN


def test_small_differences_in_measurement_do_not_change_the_ring() -> None:
    rng = random.Random(4)
    rings: set[tuple[str, ...]] = set()
    for _ in range(20):
        net = topology(*"abcdef")
        for peer, other in itertools.combinations("abcdef", 2):
            speed = 117e6 * rng.uniform(0.97, 1.03)
            net.connect(peer, other, ConnectionProfile(latency=2e-4, bandwidth_out=speed, bandwidth_in=speed))
        rings.add(net.ring_order())
    assert rings == {tuple("abcdef")}


links = st.builds(
    ConnectionProfile,
    kind=st.sampled_from(LinkKind),
    latency=st.none() | st.floats(1e-6, 1),
    bandwidth_out=st.none() | st.floats(1e3, 1e10),
    bandwidth_in=st.none() | st.floats(1e3, 1e10),
)


@st.composite
def clusters(draw: st.DrawFn) -> list[tuple[str, str, ConnectionProfile]]:
    count = draw(st.integers(2, 7))
    return [
        (f"p{a}", f"p{b}", draw(links)) for a in range(count) for b in range(a) if draw(st.booleans()) or b == a - 1
    ]


@given(clusters(), st.dictionaries(st.sampled_from([f"p{n}" for n in range(7)]), st.sampled_from("xyz")), st.randoms())
@settings(max_examples=60)
def test_the_ring_is_the_same_however_the_news_came_and_visits_each_peer_once_and_each_host_once(
    known: list[tuple[str, str, ConnectionProfile]], hosts: dict[str, str], rng: random.Random
) -> None:
    peers = sorted({end for peer, other, _ in known for end in (peer, other)})
    first = topology(*peers, hosts=hosts)
    for peer, other, link in known:
        first.connect(peer, other, link)
    second = topology(*rng.sample(peers, len(peers)), hosts=hosts)
    for peer, other, link in rng.sample(known, len(known)):
        if rng.random() < 0.5:
            second.connect(peer, other, link)
        else:
            second.connect(other, peer, link.reversed)
    assert first.ring_order() == second.ring_order()
    order = first.ring_order()
    assert sorted(order) == peers
    visits = [host for host, _ in itertools.groupby(hosts.get(peer, peer) for peer in order)]
    # The ring is written from some peer on, and never from inside a host.
    assert len(visits) == len(set(visits))


def test_what_is_not_measured_counts_as_its_kind() -> None:
    assert ConnectionProfile(kind=LinkKind.THUNDERBOLT).bandwidth == LinkKind.THUNDERBOLT.nominal_bandwidth
    assert ConnectionProfile().seconds(MIB) >= ConnectionProfile(kind=LinkKind.ETHERNET).seconds(MIB)
    assert ConnectionProfile(bandwidth_in=5.0).bandwidth == 5.0


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["latency", "bandwidth_out", "bandwidth_in"])
def test_a_measurement_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        ConnectionProfile(**{name: value})


def test_nodes_that_are_not_heard_are_forgotten_with_their_links() -> None:
    net = topology("a", "b", "c")
    net.connect("a", "b", GIGABIT)
    net.connect("b", "c", GIGABIT)
    net.touch("a", 100.0)
    net.touch("b", 95.0)
    net.touch("b", 20.0)  # news that comes late makes nobody older
    net.touch("stranger", 100.0)
    assert net.prune(110.0, stale_after=50.0) == ["c"]
    assert list(net.nodes) == ["a", "b"]
    assert [(peer, other) for peer, other, _ in net.links()] == [("a", "b")]
    assert net.prune(110.0, stale_after=50.0) == []
    assert net.ring_order() == ("a", "b")


def test_neighbours_are_those_of_the_ring() -> None:
    net = topology("a", "b", "c")
    assert net.neighbours("a") == ("c", "b")
    assert topology("a").neighbours("a") == ("a", "a")
    with pytest.raises(InvalidArgumentError, match="not a node"):
        net.neighbours("z")


def test_a_ring_of_some_is_asked_for_by_name_even_of_peers_that_are_not_known_yet() -> None:
    net = topology("a", "b", "c")
    assert net.ring_order(["c", "a"]) == ("a", "c")
    assert net.ring_order(["new", "a"]) == ("a", "new")
    assert net.ring_order([]) == ()
    assert net.slowest_link(()) is None
    assert net.slowest_link(("a",)) is None


def test_a_link_needs_two_known_ends() -> None:
    net = topology("a")
    with pytest.raises(InvalidArgumentError, match="other='b'"):
        net.connect("a", "b", GIGABIT)
    with pytest.raises(InvalidArgumentError, match="itself"):
        net.connect("a", "a", GIGABIT)


def test_a_profile_travels_in_a_message() -> None:
    node = NodeProfile(peer="a.b", host="h", cores=8, accelerators=(Accelerator("NVIDIA H200", 5),), version="1")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(node), type=NodeProfile) == node
    link = ConnectionProfile(kind=LinkKind.WIFI, latency=0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(link), type=ConnectionProfile) == link
    assert node.accelerator_memory == 5
