"""What this machine's interfaces are made of, read from folders and texts as systems have them."""

from __future__ import annotations

import socket
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.discovery.interfaces import Interface, choose
from ringfort.cluster.discovery.system import list_interfaces, parse_hardware_ports

Address = namedtuple("Address", "family address netmask")
Stats = namedtuple("Stats", "isup speed mtu flags")


class Machine:
    """A made-up machine: what psutil says, and a folder like /sys/class/net."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.addresses: dict[str, list[Address]] = {}
        self.stats: dict[str, Stats] = {}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: self.addresses)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: self.stats)

    def add(self, name: str, *things: str, flags: str = "up,broadcast,running,multicast", link_type: int = 1) -> None:
        number = len(self.stats) + 1
        self.addresses[name] = [Address(socket.AF_INET, f"10.0.{number}.1", "255.255.255.0")]
        self.stats[name] = Stats(True, 1000, 1500, flags)
        entry = self.folder / name
        entry.mkdir()
        (entry / "type").write_text(f"{link_type}\n")
        for thing in things:
            path, _, target = thing.partition(" -> ")
            if target:
                (entry / path).parent.mkdir(parents=True, exist_ok=True)
                (entry / path).symlink_to(self.folder / target)
            elif thing.endswith("/"):
                (entry / thing).mkdir(parents=True)
            else:
                (entry / thing.partition("=")[0]).write_text(thing.partition("=")[2])

    def list(self) -> dict[str, Interface]:
        return {interface.name: interface for interface in list_interfaces(self.folder)}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_linux_tells_what_an_interface_is_made_of(machine: Machine) -> None:
    machine.add("lo", flags="up,loopback,running", link_type=772)
    machine.add("enp3s0", "device/")
    machine.add("wlan0", "device/", "wireless/")
    machine.add("thunderbolt0", "device/driver -> drivers/thunderbolt-net")
    machine.add("docker0", "bridge/", "lower_veth1 -> veth1")
    machine.add("veth1", "brport/", "master -> docker0")
    machine.add("tap0", "tun_flags=0x1002")
    machine.add("wg0", flags="up,pointopoint,running,noarp", link_type=65534)
    machine.add("dummy0", flags="up,broadcast,running,noarp")
    machine.add("vxlan5", "uevent=DEVTYPE=vxlan\nINTERFACE=vxlan5\n")
    listing = machine.list()
    assert listing["enp3s0"].kind is LinkKind.ETHERNET
    assert listing["enp3s0"].prefixes == (24,)
    assert listing["wlan0"].kind is LinkKind.WIFI
    assert listing["thunderbolt0"].kind is LinkKind.THUNDERBOLT
    assert listing["docker0"].ports == ("veth1",)
    assert listing["veth1"].bridge == "docker0"
    chosen = choose(list(listing.values()))
    assert [interface.name for interface in chosen.interfaces] == ["thunderbolt0", "enp3s0", "wlan0"]


@pytest.mark.parametrize("name", ["awdl0", "llw0", "anpi1", "vmnet8", "cali1f2e", "utun3", "bridge100"])
def test_names_tell_where_the_system_does_not(machine: Machine, name: str) -> None:
    machine.add(name)
    machine.add("en0")
    for entry in (name, "en0"):
        (machine.folder / entry / "type").unlink()
        (machine.folder / entry).rmdir()
    assert [interface.name for interface in choose(list(machine.list().values())).interfaces] == ["en0"]


def test_an_interface_that_goes_away_while_it_is_read_is_skipped(machine: Machine) -> None:
    machine.add("eth0")
    machine.add("gone")
    del machine.stats["gone"]
    assert list(machine.list()) == ["eth0"]


def test_an_address_without_a_netmask_is_in_no_network(machine: Machine) -> None:
    machine.add("eth0")
    machine.addresses["eth0"] = [Address(socket.AF_INET, "10.0.0.1", None), Address(socket.AF_INET6, "fe80::1", "odd")]
    assert choose(list(machine.list().values())).interface_of("10.0.0.2") is None


def test_the_hardware_ports_of_a_mac_are_understood() -> None:
    text = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:00:00:00:00

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:00:00:00:01

Hardware Port: Thunderbolt 1
Device: en2

Hardware Port: Thunderbolt Ethernet Slot 1
Device: en7

Hardware Port: Thunderbolt Bridge
Device: bridge0

VLAN Configurations
===================
"""
    assert parse_hardware_ports(text) == {
        "en0": LinkKind.ETHERNET,
        "en1": LinkKind.WIFI,
        "en2": LinkKind.THUNDERBOLT,
        "en7": LinkKind.ETHERNET,
        "bridge0": LinkKind.THUNDERBOLT,
    }


def test_this_machine_has_loopback() -> None:
    loopback = [interface for interface in list_interfaces() if interface.is_loopback]
    assert any("127.0.0.1" in interface.addresses for interface in loopback)
