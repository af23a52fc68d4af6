"""What the doctor says of what was found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.diagnosis.checks import FIRST_RELEASE, Check, Findings, Outcome, Torch, run_checks
from ringfort.cluster.discovery.interfaces import Interface, choose

CARD = Interface(
    name="eth0", addresses=("10.0.0.1",), prefixes=(24,), kind=LinkKind.ETHERNET, speed=1000, hardware=True
)
RADIO = Interface(name="wlan0", addresses=("10.0.1.1",), prefixes=(24,), kind=LinkKind.WIFI, hardware=True)
LO = Interface(name="lo", addresses=("127.0.0.1",), prefixes=(8,), kind=LinkKind.LOOPBACK)
HEALTHY = Findings(
    choice=choose([LO, CARD]),
    multicast={"eth0": ""},
    announced=("10.0.0.2",),
    ports={"10.0.0.1": ""},
    clock=FIRST_RELEASE + 1,
    key="k7qf-3m2x-9rte-w0aj",
    cluster="default",
    version="1.0",
    met={"desk (10.0.0.2:1)": "1.0"},
    firewall={"nft": ""},
    torch=Torch(version="2.13.0+cu126", cuda="12.6", devices=("NVIDIA H200",)),
    accelerators=("NVIDIA H200 (141 GiB)",),
)
OPEN_NFT = """table inet filter {
  chain input {
    type filter hook input priority 0; policy accept;
  }
  chain forward {
    type filter hook forward priority 0; policy drop;
  }
}
"""
FIREWALLS = {
    "ufw": ("Status: active\n", "Status: inactive\n"),
    "firewalld": ("running\n", "not running\n"),
    "iptables": ("-P INPUT DROP\n-A INPUT -i lo -j ACCEPT\n", "-P INPUT ACCEPT\n"),
    "nft": (OPEN_NFT.replace("policy accept", "policy drop"), OPEN_NFT),
    "macOS": ("Firewall is enabled. (State = 1)\n", "Firewall is disabled. (State = 0)\n"),
}


def complaints(**found: object) -> list[Check]:
    return [check for check in run_checks(replace(HEALTHY, **found)) if check.outcome is not Outcome.PASS]


def test_a_healthy_machine_passes_every_check() -> None:
    checks = run_checks(HEALTHY)
    assert {check.outcome for check in checks} == {Outcome.PASS}
    assert list(dict.fromkeys(check.name for check in checks)) == [
        "interfaces",
        "multicast",
        "ports",
        "peers",
        "firewall",
        "mtu",
        "key",
        "version",
        "torch",
        "gpu",
        "clock",
    ]


@pytest.mark.parametrize(
    ("found", "name", "outcome", "words", "fix"),
    [
        ({"choice": None, "choice_error": "no eth9"}, "interfaces", "fail", "no eth9", "RINGFORT_INTERFACES"),
        ({"choice": choose([LO])}, "interfaces", "warn", "only this machine", "cable"),
        ({"choice": choose([RADIO])}, "interfaces", "warn", "only Wi-Fi", "cable"),
        ({"multicast": {"eth0": "sent, but not heard"}}, "multicast", "fail", "eth0: sent, but", "UDP port 5353"),
        (
            {"choice": choose([replace(CARD, multicast=False)]), "multicast": {"eth0": "off"}},
            "multicast",
            "fail",
            "eth0 carries no multicast",
            "ip link set dev eth0 multicast on",
        ),
        ({"mdns_error": ("taken", "free it")}, "multicast", "fail", "taken", "free it"),
        ({"announced": ()}, "multicast", "warn", "desk (10.0.0.2:1) can be reached by address but", "client isolation"),
        ({"refusals": ("10.0.0.9:1: other secret; join it",)}, "peers", "warn", "10.0.0.9:1: other secret", "join it"),
        (
            {"announced": (), "met": {}, "other_clusters": ("10.0.0.3", "10.0.0.4")},
            "peers",
            "warn",
            "2 machines of other clusters announce themselves here (10.0.0.3, 10.0.0.4), and none of this one",
            "`ringfort key join CODE` on the others",
        ),
        ({"ports": {"10.0.0.1": "no answer"}}, "ports", "fail", "10.0.0.1: no answer", "firewall"),
        ({"peers": {"10.0.0.2:1": "no answer"}}, "ports", "fail", "10.0.0.2:1: no answer", "running there"),
        ({"choice": choose([replace(CARD, mtu=576)])}, "mtu", "fail", "too small", "mtu 1500"),
        ({"choice": choose([replace(CARD, mtu=9000)])}, "mtu", "warn", "9000", "the same on every machine"),
        ({"segments": {"10.0.0.2:1": 1228}}, "mtu", "warn", "about 1280 bytes, and eth0 has 1500", "same MTU"),
        ({"key_error": ("loose", "chmod 600")}, "key", "fail", "loose", "chmod 600"),
        ({"key": "", "cluster": ""}, "key", "warn", "no key yet", "ringfort key join"),
        ({"met": {"b": "0.9"}}, "version", "warn", "b has Ringfort 0.9, this machine has 1.0", "ringfort, on b"),
        ({"met": {"b": "1.10"}}, "version", "warn", "b has Ringfort 1.10", "ringfort, on this machine"),
        ({"torch": Torch(version="2.5.1")}, "torch", "warn", "2.5.1 is older than 2.7", "pip install --upgrade torch"),
        (
            {"torch": Torch(version="2.7", knows_ringfort=False)},
            "torch",
            "warn",
            "does not find",
            "pip install ringfort",
        ),
        ({"torch": Torch(version="2.7+cpu")}, "gpu", "warn", "is built for the CPU", "built for CUDA"),
        ({"torch": Torch(version="2.7", cuda="12.6", devices=())}, "gpu", "warn", "cannot use it", "nvidia-smi"),
        ({"firewall": {}}, "firewall", "unknown", "it is not known whether one is on", "firewall"),
        ({"firewall_hidden": ("iptables",)}, "firewall", "unknown", "by root", "sudo iptables -S INPUT"),
        (
            {"torch": Torch(version="2.7", cuda="12.6", error="ImportError")},
            "gpu",
            "unknown",
            "could not be asked",
            "import torch",
        ),
        (
            {"platform": "darwin", "announced": (), "met": {"this machine (10.0.0.1:1)": "1.0"}},
            "permission",
            "unknown",
            "macOS 15 and later",
            "Local Network: switch on",
        ),
        ({"clock": 5.0}, "clock", "warn", "never set", "set-ntp"),
        *(({"firewall": {tool: on}}, "firewall", "warn", tool, "") for tool, (on, _) in FIREWALLS.items()),
    ],
)
def test_each_cause_is_one_line_with_its_fix(
    found: dict[str, object], name: str, outcome: str, words: str, fix: str
) -> None:
    lines = [check for check in complaints(**found) if words in check.what]
    assert [(check.name, check.outcome.value) for check in lines] == [(name, outcome)]
    assert lines[0].fix
    assert fix in lines[0].fix


@pytest.mark.parametrize("peers", [{}, {"10.0.0.2:1": ""}, {"10.0.0.2:1": "no answer"}])
def test_where_nobody_was_met_nothing_is_said_of_the_network_between(peers: dict[str, str]) -> None:
    """Whatever takes a connection at an address may be something else."""
    checks = run_checks(replace(HEALTHY, announced=(), met={}, peers=peers))
    told = [check for check in checks if check.name == "multicast"]
    assert [check.outcome for check in told] == [Outcome.PASS, Outcome.UNKNOWN]
    assert "it is not known whether the network carries it" in told[-1].what
    [nobody] = [check for check in checks if check.name == "peers"]
    assert nobody.outcome is Outcome.UNKNOWN
    assert nobody.what.startswith("no peer is there now")


def test_what_this_machine_hears_of_itself_says_nothing_of_the_network() -> None:
    here = ("this machine",)
    checks = run_checks(replace(HEALTHY, announced=here, other_clusters=here, met={"this machine (10.0.0.1:1)": "1.0"}))
    outcomes = {check.name: check.outcome for check in checks}  # of each the last line
    assert outcomes["multicast"] is Outcome.WARN
    assert outcomes["peers"] is Outcome.WARN


def test_machines_of_other_clusters_are_no_fault_beside_one_of_this_cluster() -> None:
    assert complaints(other_clusters=("10.0.0.3",)) == []


def test_on_macos_others_that_are_heard_prove_the_permission() -> None:
    assert complaints(platform="darwin") == []


@pytest.mark.parametrize("tool", FIREWALLS)
def test_a_firewall_that_is_off_is_no_cause(tool: str) -> None:
    assert complaints(firewall={tool: FIREWALLS[tool][1]}) == []


@pytest.mark.parametrize("segment", [1460, 1448, 1428, 0])
def test_ordinary_packets_are_no_mismatch(segment: int) -> None:
    assert complaints(segments={"10.0.0.2:1": segment, "8.8.8.8:1": 500}) == []
