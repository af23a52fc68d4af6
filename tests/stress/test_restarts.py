"""Hosts that are cut off, reset, killed and started again never make two groups of one, with real processes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.namespaces import Lan, lan, needs_namespaces, needs_resets
from tests.helpers.nodes import Node, agree, nodes_on
from tests.stress.test_nodes import check_history

pytestmark = needs_namespaces

WATCHED = 8.0
"""Seconds in which a second group would long have begun."""


def waits_for(node: Node) -> list[str]:
    """What it said that it waits for."""
    return [line["text"] for line in node.lines if line.get("event") == "Waiting"]


def watch(nodes: list[Node], seconds: float = WATCHED) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for node in nodes:
            node.settle()
        time.sleep(0.02)


def start_all(nodes: list[Node]) -> None:
    for node in nodes:
        node.start()
    agree(nodes)


def check(nodes: list[Node]) -> None:
    check_history([line for node in nodes for line in node.lines if line.get("event", "").startswith("Epoch")])


@pytest.mark.parametrize("word", [True, False])
def test_a_cut_off_half_that_is_started_again_waits_for_the_other_and_says_so(word: bool) -> None:
    with lan(4) as net, nodes_on(list(net.hosts)) as (nodes,):
        start_all(nodes)
        by_id = sorted(nodes, key=lambda node: node.peer)
        kept, half = by_id[:2], by_id[2:]
        net.split([node.host for node in half])
        agree(kept)
        watch(half, 2.0)
        for node in half:
            node.kill(word=word)
            node.restart()
            node.start()
        watch(nodes)
        assert all(node.epoch is None for node in half)
        assert all("was in a group with" in waits_for(node)[-1] for node in half)
        agree(kept)
        net.unite()
        agree(nodes)
        check(nodes)


def test_machines_that_all_lost_power_go_on_and_a_missing_one_is_waited_for_unless_named() -> None:
    with lan(3) as net, nodes_on(list(net.hosts)) as (nodes,):
        start_all(nodes)
        gone = nodes[2].peer
        for node in nodes:
            node.kill(word=False)
        for node in nodes[:2]:
            node.restart()
            node.start()
        watch(nodes[:2], 4.0)
        assert all(node.epoch is None for node in nodes[:2])
        nodes[0].kill(word=False)
        nodes[0].restart()
        nodes[0].start(restart_without=[gone])
        agree(nodes[:2])
        check(nodes)


def test_a_run_that_ended_well_leaves_nothing_to_wait_for() -> None:
    with lan(3) as net, nodes_on(list(net.hosts)) as (nodes,):
        start_all(nodes)
        for node in nodes:
            node.ask("stop", "stopped")
        start_all(nodes[:2])
        assert not any("was in a group with" in text for node in nodes for text in waits_for(node))


@needs_resets
def test_resets_between_one_host_and_the_rest_split_nothing() -> None:
    with lan(4) as net, nodes_on(list(net.hosts)) as (nodes,):
        start_all(nodes)
        victim, rest = nodes[0], nodes[1:]
        reset_and_cut(net, victim)
        agree(rest)
        watch(nodes)
        assert victim.epoch is None
        net.heal(victim.host)
        agree(nodes)
        for node in nodes:
            net.reset(node.host)
            agree(nodes)
        check(nodes)


def reset_and_cut(net: Lan, node: Node) -> None:
    net.reset(node.host)
    net.cut(node.host)


def test_a_copied_home_does_not_say_that_a_living_process_has_ended(tmp_path: Path) -> None:
    """The first of two is cut off. A third host starts with a copy of its home, of before there were marks: the key and
    the promises of the first are there too."""
    key = NetworkNamespace.generate("home").join_code()
    with lan(3, machine_ids=True) as net:
        nodes = [Node(host, key, tmp_path / str(host.number)) for host in net.hosts[:2]]
        try:
            start_all(nodes)
            first, second = sorted(nodes, key=lambda node: node.peer)
            net.cut(first.host)
            copy = tmp_path / "copy"
            shutil.copytree(first.home, copy)
            (copy / "host").unlink()
            nodes.append(Node(net.hosts[2], key, copy))
            nodes[2].start()
            assert nodes[2].peer.rpartition(".")[0] == first.peer.rpartition(".")[0]
            watch(nodes)
            assert first.epoch is not None
            assert second.epoch is None
            assert nodes[2].epoch is None
            net.heal(first.host)
            first.until("to see a clone", lambda: any(line.get("event") == "CloneFound" for line in first.lines))
            told = next(line["text"] for line in first.lines if line.get("event") == "CloneFound")
            assert "rm ~/.ringfort/node_keypair there" in told
            nodes[2].kill()
            agree([first, second])
        finally:
            for node in nodes:
                node.kill()


def test_a_home_that_was_copied_with_its_marks_has_a_key_of_its_own(tmp_path: Path) -> None:
    key = NetworkNamespace.generate("home").join_code()
    with lan(2, machine_ids=True) as net:
        nodes = [Node(net.hosts[0], key, tmp_path / "home")]
        try:
            nodes[0].start()
            shutil.copytree(tmp_path / "home", tmp_path / "copy")
            nodes.append(Node(net.hosts[1], key, tmp_path / "copy"))
            nodes[1].start()
            agree(nodes)
        finally:
            for node in nodes:
                node.kill()
