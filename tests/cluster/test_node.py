"""Cluster nodes on real hosts: network namespaces on switches, processes that are killed, frozen and cut off."""

from __future__ import annotations

import random
import signal
import time

from tests.helpers.namespaces import lan, needs_namespaces
from tests.helpers.nodes import Node, agree, nodes_on

pytestmark = needs_namespaces


def leader_of(nodes: list[Node]) -> Node:
    peers = nodes[0].ask("look", "peers")
    leader = next(peer["peer"] for peer in peers if peer["role"] == "leader")
    return next(node for node in nodes if node.peer == leader)


def test_four_hosts_agree_on_one_epoch_and_other_clusters_on_the_wire_are_undisturbed() -> None:
    with lan(4) as net, nodes_on(list(net.hosts)) as (ours,), nodes_on(list(net.hosts[:2])) as (theirs,):
        for node in theirs:
            node.start()
        agree(theirs)
        before = [node.epoch for node in theirs]
        order = random.Random(1).sample(ours, 4)
        for node in order:
            node.start()
        agreed = agree(ours)
        print(f"agreed {agreed - max(node.started for node in ours):.2f} s after the last start")
        agree(theirs)
        assert [node.epoch for node in theirs] == before
        assert all({peer["peer"] for peer in node.ask("look", "peers")} == {n.peer for n in ours} for node in ours)


def test_a_leader_that_is_killed_frozen_or_cut_off_is_replaced_and_comes_back() -> None:
    with lan(4) as net, nodes_on(list(net.hosts)) as (nodes,):
        for node in nodes:
            node.start()
        agree(nodes)

        frozen = leader_of(nodes)
        others = [node for node in nodes if node is not frozen]
        frozen.process.send_signal(signal.SIGSTOP)
        at = time.monotonic()
        print(f"frozen: {agree(others) - at:.2f} s")
        frozen.process.send_signal(signal.SIGCONT)
        agree(nodes)

        cut = leader_of(nodes)
        others = [node for node in nodes if node is not cut]
        net.cut(cut.host)
        at = time.monotonic()
        print(f"cut: {agree(others) - at:.2f} s")
        net.heal(cut.host)
        agree(nodes)

        killed = leader_of(nodes)
        others = [node for node in nodes if node is not killed]
        killed.kill()
        at = time.monotonic()
        print(f"killed: {agree(others) - at:.2f} s")
        killed.restart()
        killed.start()
        agree(nodes)


def test_a_collective_names_the_frozen_rank_and_the_others_go_on_without_it() -> None:
    with lan(3) as net, nodes_on(list(net.hosts)) as (nodes,):
        for node in nodes:
            node.start()
        agree(nodes)
        for node in nodes:
            node.do("establish")
        ranks = {node.next("rank")["rank"]: node for node in nodes}
        for node in nodes:
            node.do("reduce", rounds=1_000_000, pause=0.005)
        frozen = ranks[1]
        frozen.process.send_signal(signal.SIGSTOP)
        at = time.monotonic()
        others = [ranks[0], ranks[2]]
        for node in others:
            line = node.next("failed")
            assert "PeerLostError: Lost rank 1: silent for" in line["failed"]
            print(f"named after {line['at'] - at:.2f} s")
        agree(others)
        for node in others:
            node.do("establish")
        assert {node.next("rank")["rank"] for node in others} == {0, 1}
        for node in others:
            node.do("reduce")
        assert [node.next("sum")["sum"] for node in others] == [3.0, 3.0]
        frozen.process.send_signal(signal.SIGCONT)
        assert "PeerLostError" in frozen.next("failed")["failed"]


def test_where_multicast_is_blocked_one_named_peer_brings_all_together() -> None:
    with lan(4) as net, nodes_on(list(net.hosts)) as (nodes,):
        net.block_multicast()
        for node in nodes:
            node.start(peers=[] if node is nodes[0] else [net.hosts[0].address()])
        agree(nodes)


def test_the_fast_interface_is_used_and_the_slow_one_when_the_fast_one_goes_down() -> None:
    with lan(2, switches=2) as net, nodes_on(list(net.hosts)) as (nodes,):
        for host in net.hosts:
            host.add_docker_bridge()
            net.limit(host, 50, switch=0)
            net.limit(host, 1000, switch=1)
        for node in nodes:
            node.start()
        agree(nodes)
        for node in nodes:
            node.do("establish")
        assert {node.next("rank")["rank"] for node in nodes} == {0, 1}
        assert sent_by(nodes, "eth1") > 0.9 * MOVED
        net.hosts[0].set_link("down", interface="eth1")
        for node in nodes:
            node.do("reduce", size=MOVED)
        for node in nodes:
            assert "Lost rank" in node.next("failed")["failed"]
        for node in nodes:
            node.do("establish")
        assert {node.next("rank")["rank"] for node in nodes} == {0, 1}
        assert sent_by(nodes, "eth0") > 0.9 * MOVED
        assert all("172.17" not in str(node.ask("look", "peers")) for node in nodes)


MOVED = 2_000_000
"""Bytes of the all-reduce that is watched: two ranks send about as much each."""


def sent_by(nodes: list[Node], interface: str) -> int:
    """The bytes that the first host sends through an interface while all ranks all-reduce."""

    def sent() -> int:
        return int(nodes[0].host.run("cat", f"/sys/class/net/{interface}/statistics/tx_bytes"))

    before = sent()
    for node in nodes:
        node.do("reduce", size=MOVED)
    assert [node.next("sum")["sum"] for node in nodes] == [3.0, 3.0]
    return sent() - before
