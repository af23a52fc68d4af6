"""Which interfaces and addresses are used: one listing for each kind of machine that people have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.discovery.interfaces import (
    MAX_ADDRESSES,
    Choice,
    Interface,
    choose,
    is_on_link,
    parse_ip,
    reachable,
)
from ringfort.errors import ConfigError

LO = Interface(
    name="lo", index=1, addresses=("127.0.0.1", "127.0.1.1", "::1"), prefixes=(8, 8, 128), kind=LinkKind.LOOPBACK
)
CARD = Interface(
    name="enp3s0",
    index=2,
    addresses=("192.168.1.20", "2001:db8::20", "fe80::20%enp3s0"),
    prefixes=(24, 64, 64),
    kind=LinkKind.ETHERNET,
    speed=1000,
    hardware=True,
)
WIFI = Interface(name="wlp2s0", index=3, addresses=("192.168.1.30",), prefixes=(24,), kind=LinkKind.WIFI, hardware=True)
DOCKER = Interface(
    name="docker0", index=4, addresses=("172.17.0.1",), prefixes=(16,), kind=LinkKind.ETHERNET, is_bridge=True,
    ports=("veth1a2b",),
)  # fmt: skip
VETH = Interface(
    name="veth1a2b", index=5, addresses=("fe80::1a2b%veth1a2b",), prefixes=(64,), kind=LinkKind.ETHERNET,
    bridge="docker0",
)  # fmt: skip
VPN = Interface(name="wg0", index=6, addresses=("10.8.0.2",), prefixes=(24,), tunnel=True, no_arp=True)
THUNDERBOLT = Interface(
    name="bridge0", index=7, addresses=("169.254.7.7",), prefixes=(16,), kind=LinkKind.THUNDERBOLT, hardware=True
)

MACHINES = {
    "a workstation with docker": ([LO, CARD, DOCKER, VETH], ["enp3s0"]),
    "a container: its eth0 is a veth, but in no bridge of its own": (
        [LO, Interface(name="eth0", index=5, addresses=("172.17.0.2",), prefixes=(16,), kind=LinkKind.ETHERNET)],
        ["eth0"],
    ),
    "a host of virtual machines whose address is on a bridge with a card in it": (
        [
            LO,
            replace(CARD, addresses=(), prefixes=(), bridge="br0"),
            Interface(name="br0", addresses=("192.168.1.20",), is_bridge=True, ports=("enp3s0", "vnet0")),
            Interface(name="vnet0", addresses=(), bridge="br0", tunnel=True),
            Interface(name="virbr0", addresses=("192.168.122.1",), is_bridge=True, ports=()),
        ],
        ["br0"],
    ),
    "a bridge over a bond over two cards": (
        [
            replace(CARD, addresses=(), prefixes=(), name="e0"),
            Interface(name="bond0", bridge="br0", ports=("e0", "e1")),
            Interface(name="br0", addresses=("192.168.1.20",), is_bridge=True, ports=("bond0",)),
        ],
        ["br0"],
    ),
    "a laptop with a cable, Wi-Fi and a VPN": ([LO, WIFI, VPN, CARD], ["enp3s0", "wlp2s0"]),
    "a Mac with Thunderbolt, Wi-Fi and AirDrop": (
        [LO, WIFI, replace(WIFI, name="awdl0", foreign="AirDrop"), THUNDERBOLT],
        ["bridge0", "wlp2s0"],
    ),
    "a card with no cable": ([LO, WIFI, replace(CARD, is_up=False)], ["wlp2s0"]),
    "a card with no address": ([LO, WIFI, replace(CARD, addresses=(), prefixes=())], ["wlp2s0"]),
    "a dummy device": ([LO, CARD, Interface(name="dummy0", addresses=("10.0.0.1",), no_arp=True)], ["enp3s0"]),
    "nothing but loopback": ([LO], ["lo"]),
    "docker, and the cable pulled": ([LO, replace(CARD, is_up=False), DOCKER, VETH], ["lo"]),
}


@pytest.mark.parametrize(("listing", "used"), MACHINES.values(), ids=list(MACHINES))
def test_the_useful_interfaces_are_used_the_fastest_kind_first(listing: list[Interface], used: list[str]) -> None:
    choice = choose(listing)
    assert [interface.name for interface in choice.interfaces] == used
    assert {name for name, _ in choice.left_out} == {interface.name for interface in listing} - set(used)
    assert all(why for _, why in choice.left_out)


def test_the_choice_does_not_depend_on_the_order_of_the_listing() -> None:
    listing = [LO, WIFI, VPN, CARD, DOCKER]
    assert choose(listing).interfaces == choose(listing[::-1]).interfaces


def test_addresses_are_ordered_and_a_link_local_one_carries_its_interface() -> None:
    bare = replace(CARD, addresses=("fe80::20", "2001:db8::20", "192.168.1.20"), prefixes=(64, 64, 24))
    assert choose([bare]).addresses == ("192.168.1.20", "2001:db8::20", "fe80::20%enp3s0")


def test_addresses_that_nobody_else_can_use_are_left_out() -> None:
    odd = replace(CARD, addresses=("127.0.1.1", "0.0.0.0", "224.0.0.1", "::1", "::ffff:10.0.0.1", "10.0.0.1"))
    assert choose([LO, odd]).addresses == ("10.0.0.1",)


def test_the_loopback_address_of_the_hosts_file_is_never_used() -> None:
    assert choose([LO]).addresses == ("127.0.0.1", "::1")


def test_an_interface_with_a_hundred_addresses_gives_a_few() -> None:
    many = replace(CARD, addresses=tuple(f"2001:db8::{number:x}" for number in range(1, 101)), prefixes=(64,) * 100)
    assert len(choose([many]).addresses) == MAX_ADDRESSES


@pytest.mark.parametrize(
    ("wanted", "addresses"),
    [
        (["wlp2s0"], ["192.168.1.30"]),
        (["wg0"], ["10.8.0.2"]),
        (["docker0"], ["172.17.0.1"]),
        (["lo"], ["127.0.0.1", "::1"]),
        (["loopback"], ["127.0.0.1", "::1"]),
        (["127.0.0.1"], ["127.0.0.1"]),
        (["192.168.1.20"], ["192.168.1.20"]),
        (["192.168.1.0/24"], ["192.168.1.20", "192.168.1.30"]),
        (["2001:db8::20", "wg0"], ["2001:db8::20", "10.8.0.2"]),
        (["fe80::20%enp3s0"], ["fe80::20%enp3s0"]),
        (["192.168.1.20", "enp3s0"], ["192.168.1.20", "2001:db8::20", "fe80::20%enp3s0"]),
        ([" wlp2s0 "], ["192.168.1.30"]),
    ],
)
def test_what_is_asked_for_is_used_whatever_it_is(wanted: list[str], addresses: list[str]) -> None:
    assert list(choose([LO, CARD, WIFI, DOCKER, VPN], wanted).addresses) == addresses


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("eth9", "no such interface or address; there are lo (127.0.0.1, 127.0.1.1, ::1), enp3s0"),
        ("10.1.2.3", "no such interface or address"),
        ("fe80::20%wlp2s0", "no such interface or address"),
        ("", "no such interface or address"),
        ("eth1", "is down"),
        ("eth2", "has no usable address"),
    ],
)
def test_a_wish_that_cannot_be_had_is_refused_with_what_there_is(wanted: str, words: str) -> None:
    down = replace(CARD, name="eth1", addresses=("10.0.0.5",), is_up=False)
    bare = replace(CARD, name="eth2", addresses=())
    with pytest.raises(ConfigError) as caught:
        choose([LO, CARD, down, bare], [wanted])
    assert words in str(caught.value)
    assert "enp3s0" in str(caught.value)


def test_a_wish_for_what_has_gone_for_now_is_passed_over_if_asked_so() -> None:
    down = replace(WIFI, is_up=False)
    assert choose([LO, CARD, down], ["wlp2s0", "enp3s0", "usb0"], strict=False).interfaces == (CARD,)
    assert choose([LO, CARD, down], ["wlp2s0"], strict=False).interfaces == ()
    assert choose([], strict=False).interfaces == ()


def test_addresses_that_a_peer_tells_are_made_usable_here() -> None:
    choice = choose([LO, CARD, WIFI])
    assert reachable(["10.0.0.1", "2001:db8::7", "10.0.0.1"], choice) == ("10.0.0.1", "2001:db8::7")
    assert reachable(["fe80::7"], choice) == ("fe80::7%enp3s0", "fe80::7%wlp2s0")
    assert reachable(["fe80::7%2"], choice) == ("fe80::7%enp3s0",)
    assert reachable(["fe80::7%elsewhere"], choice) == ()
    assert reachable(["127.0.0.1", "0.0.0.0", "224.0.0.251", "::1", "a name", ""], choice) == ()
    assert reachable(["127.0.0.1", "127.0.1.1"], choose([LO])) == ("127.0.0.1",)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1", True),
        ("10.0.1.1", False),
        ("8.8.8.8", False),
        ("169.254.169.254", False),
        ("2001:4860:4860::8888", False),
        ("2001:db8:0:1::7", True),
        ("fe80::7%enp3s0", True),
        ("127.0.0.1", False),
        ("a name", False),
    ],
)
def test_only_neighbours_are_on_the_link(address: str, expected: bool) -> None:
    card = replace(CARD, addresses=("10.0.0.20", "2001:db8:0:1::20"), prefixes=(24, 64))
    assert is_on_link(address, choose([LO, card])) is expected


def test_loopback_is_on_the_link_where_it_is_what_is_used() -> None:
    assert is_on_link("127.0.0.1", choose([LO]))
    assert not is_on_link("8.8.8.8", choose([LO]))


def test_a_machine_without_any_interface_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="ip link set lo up"):
        choose([])


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("192.168.1.77", "enp3s0"),
        ("10.8.0.9", "wg0"),
        ("172.17.3.4", "docker0"),
        ("2001:db8::99", "enp3s0"),
        ("fe80::5%enp3s0", "enp3s0"),
        ("fe80::5%2", "enp3s0"),
        ("fe80::5%wlp2s0", None),
        ("192.168.1.30", "wlp2s0"),
        ("8.8.8.8", None),
        ("a name", None),
    ],
)
def test_the_interface_that_leads_to_an_address_is_known(address: str, name: str | None) -> None:
    found = Choice((LO, CARD, WIFI, DOCKER, VPN)).interface_of(address)
    assert (found and found.name) == name


INTERFACES = st.builds(
    Interface,
    name=st.sampled_from(["eth0", "eth1", "wlan0", "br0", "tap0"]),
    index=st.integers(0, 9),
    addresses=st.lists(st.ip_addresses().map(str) | st.sampled_from(["fe80::1%eth0", "odd", "10.0.0.1"])).map(tuple),
    prefixes=st.lists(st.integers(0, 128)).map(tuple),
    kind=st.sampled_from([kind for kind in LinkKind if kind is not LinkKind.SHARED_MEMORY]),
    is_up=st.booleans(),
    is_bridge=st.booleans(),
    ports=st.lists(st.sampled_from(["eth0", "gone"])).map(tuple),
    bridge=st.sampled_from(["", "br0"]),
    tunnel=st.booleans(),
    no_arp=st.booleans(),
)


@settings(max_examples=40)
@given(st.lists(INTERFACES, max_size=5, unique_by=lambda interface: interface.name), st.ip_addresses().map(str))
def test_any_listing_is_judged_and_what_is_chosen_can_be_parsed(listing: list[Interface], address: str) -> None:
    choice = choose([LO, *listing])
    assert choice.interfaces
    assert all(parse_ip(text) is not None for text in choice.addresses)
    assert len(choice.interfaces) + len(choice.left_out) == len(listing) + 1
    choice.interface_of(address)
