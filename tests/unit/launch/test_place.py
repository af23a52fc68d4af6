"""Where the ranks of a run meet."""

from __future__ import annotations

import pytest

from ringfort.cluster.discovery.interfaces import Interface
from ringfort.launch import place as place_module
from ringfort.launch.place import best_address, interface_towards

WIRE = Interface(name="eth0", index=2, addresses=("10.0.0.1", "fd00::1", "fe80::1%eth0"), prefixes=(24, 64, 64))
RADIO = Interface(name="wlan0", index=3, addresses=("192.168.1.1",), prefixes=(24,))
ALL = ["192.168.1.1", "fe80::1%eth0", "fd00::1", "10.0.0.1"]


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "list_interfaces", lambda: [WIRE, RADIO])


@pytest.mark.parametrize(
    ("mine", "links", "best"),
    [
        (ALL, ["eth0", "eth0", "wlan0"], "10.0.0.1"),
        (ALL, ["eth0", "wlan0", "wlan0"], "192.168.1.1"),
        (ALL[:3], ["eth0"], "fd00::1"),  # a scope means something here alone
        (ALL[:2], ["eth0"], "fe80::1%eth0"),  # but there the others are
        (ALL, [], "192.168.1.1"),
    ],
)
def test_the_ranks_meet_on_the_interface_that_most_links_go_through(
    mine: list[str], links: list[str], best: str
) -> None:
    assert best_address(mine, links) == best


def test_the_interface_towards_an_address_is_the_one_of_its_network() -> None:
    assert interface_towards("192.168.1.77") == "wlan0"
    assert interface_towards("10.0.0.9") == "eth0"
    assert interface_towards("172.16.0.1") == ""
