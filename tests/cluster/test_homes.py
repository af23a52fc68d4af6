"""Hosts that share a home, as over NFS."""

from __future__ import annotations

from pathlib import Path

from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.namespaces import lan, needs_namespaces
from tests.helpers.nodes import Node, agree

pytestmark = needs_namespaces


def test_hosts_that_share_a_home_are_nodes_of_their_own(tmp_path: Path) -> None:
    key, home = NetworkNamespace.generate("home").join_code(), tmp_path / "home"
    with lan(2, machine_ids=True) as net:
        nodes = [Node(host, key, home) for host in net.hosts]
        try:
            for node in nodes:
                node.start()
            agree(nodes)
        finally:
            for node in nodes:
                node.kill()
    assert (home / "node_keypair").is_file()
    assert [(path / "node_keypair").is_file() for path in (home / "hosts").iterdir()] == [True]
