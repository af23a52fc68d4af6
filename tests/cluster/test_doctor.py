"""`ringfort doctor` on real hosts: network namespaces, each with one thing wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringfort.cluster.core.other_clusters import HOW_TO_JOIN
from ringfort.identity.keypair import KEY_FILE, NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.namespaces import Host, lan, needs_namespaces
from tests.helpers.nodes import nodes_on

pytestmark = needs_namespaces


def report(host: Host, home: Path, *arguments: str, key: str = "") -> tuple[int, dict[str, list[dict[str, str]]]]:
    """The exit code, and the lines of each check."""
    process = host.start(
        sys.executable, "-m", "ringfort.cli", "doctor", "--json", *arguments,
        variables={"RINGFORT_HOME": str(home), "RINGFORT_KEY": key}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, _ = process.communicate(timeout=60)
    found: dict[str, list[dict[str, str]]] = {}
    for line in json.loads(out)["checks"]:
        found.setdefault(line["check"], []).append(line)
    return process.returncode, found


def outcomes(lines: list[dict[str, str]]) -> set[str]:
    return {line["outcome"] for line in lines}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_a_healthy_host_fails_nothing_and_the_doctor_makes_nothing(home: Path) -> None:
    with lan(1) as net:
        net.hosts[0].add_docker_bridge()
        code, found = report(net.hosts[0], home)
    assert code == 0
    assert all("fail" not in outcomes(lines) for lines in found.values())
    own, others = found["multicast"]
    assert own["what"] == "eth0: sent, and received by this machine itself"
    assert "not known" in others["what"]
    assert outcomes([others, *found["peers"]]) == {"unknown"}
    assert "in no cluster yet" in found["peers"][0]["what"]
    assert "10.77.0.1" in found["ports"][0]["what"]
    assert "docker0" in found["interfaces"][-1]["what"]
    assert not home.exists()


def test_what_is_wrong_is_found_and_ends_with_exit_code_1(home: Path) -> None:
    serve = "import socket, sys; s = socket.create_server(('', 700)); print(flush=True); sys.stdin.read()"
    home.mkdir(mode=0o755)
    with lan(2, switches=2) as net:
        one, two = net.hosts
        one.set_link("mtu", "9000")
        one.set_link("multicast", "off", interface="eth1")
        server = two.start(sys.executable, "-c", serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        server.stdout.readline()
        code, found = report(one, home, "--peer", f"{two.address()}:700", "--peer", f"{two.address()}:701")
    assert code == 1
    assert any(line["what"].endswith(":700 answers") for line in found["ports"])
    assert any(line["what"].endswith(":701: Connection refused") for line in found["ports"])
    assert any("eth1 carries no multicast" in line["what"] for line in found["multicast"])
    assert any("about 1500 bytes, and eth0 has 9000" in line["what"] for line in found["mtu"])
    assert found["key"][0]["fix"].startswith("chmod 700")


def test_peers_that_are_there_are_met_and_their_versions_are_compared(home: Path) -> None:
    NodeIdentity.load_or_generate(home / KEY_FILE)
    with lan(2) as net, nodes_on([net.hosts[1]]) as ((node,),):
        node.start()
        code, found = report(net.hosts[0], home, key=node.key)
        _, elsewhere = report(net.hosts[0], home, key=NetworkNamespace.generate("other").join_code())
    assert code == 0
    assert elsewhere["multicast"][-1]["what"] == f"{net.hosts[1].address()} is heard: the network carries multicast"
    alone = elsewhere["peers"][-1]  # beside the other side, which still tries where the first doctor was
    assert (alone["outcome"], alone["fix"]) == ("warn", HOW_TO_JOIN)
    assert alone["what"].startswith(f"1 machine of another cluster announces itself here ({net.hosts[1].address()})")
    assert found["peers"][0]["what"].startswith("connected: ")
    assert found["multicast"][-1]["what"] == f"{net.hosts[1].address()} is heard: the network carries multicast"
    assert found["version"][0]["what"].endswith("so has every connected peer")


def test_a_host_that_is_alone_is_told_so(home: Path) -> None:
    with lan(1) as net:
        net.unplug(net.hosts[0])
        code, found = report(net.hosts[0], home)
        assert code == 0
        assert outcomes(found["interfaces"]) == {"warn"}
        code, found = report(net.hosts[0], home, "--interface", "eth0")
        assert code == 1
        assert outcomes(found["interfaces"]) == {"fail"}
