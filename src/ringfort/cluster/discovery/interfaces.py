"""Chooses the network interfaces and addresses of a machine that are useful to a cluster. Pure.

`choose` judges a listing of any machine; `system.py` reads that of this one. It goes by what an interface is rather
than by its name, because the same name means different things: `eth0` is a card on one machine and the end of a
container's veth on another, `bridge0` is a Mac's Thunderbolt or a hypervisor's network.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, repeat
from typing import Final

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.config import parse_address
from ringfort.errors import ConfigError

MAX_ADDRESSES: Final = 8
"""Addresses of one interface that are used: IPv6 privacy extensions add an address every day and keep the old ones."""

LOOPBACK_ADDRESSES: Final = ("127.0.0.1", "::1")
"""Other loopback addresses, such as Debian's 127.0.1.1 for the host name, are not used."""

_SPEED_ORDER: Final = (LinkKind.THUNDERBOLT, LinkKind.ETHERNET, LinkKind.UNKNOWN, LinkKind.WIFI, LinkKind.LOOPBACK)

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface as the system describes it."""

    name: str
    index: int = 0
    addresses: tuple[str, ...] = ()
    """In the system's order, without prefix lengths. A link-local IPv6 address may have a scope, as `fe80::1%eth0`."""
    prefixes: tuple[int, ...] = ()
    """The prefix length of each address, if the system tells."""
    kind: LinkKind = LinkKind.UNKNOWN
    is_up: bool = True
    """It is switched on, and its cable or radio is connected."""
    multicast: bool = True
    mtu: int = 1500
    speed: int = 0
    """Megabits per second, as reported by the card; 0 if unknown."""
    hardware: bool = False
    """It has a device, real or virtualised."""
    is_bridge: bool = False
    ports: tuple[str, ...] = ()
    """The interfaces in a bridge or bond."""
    bridge: str = ""
    """The bridge that it is a port of."""
    tunnel: bool = False
    """It is a VPN, a tap of a virtual machine, or a point-to-point link."""
    no_arp: bool = False
    """It does not resolve neighbours, as dummy devices."""
    foreign: str = ""
    """Its purpose if that is not the local network, such as `AirDrop`."""

    @property
    def is_loopback(self) -> bool:
        return self.kind is LinkKind.LOOPBACK

    @cached_property
    def networks(self) -> tuple[IPInterface, ...]:
        """Each valid address with its network, which is the address alone if the system does not tell."""
        listed = zip(self.addresses, chain(self.prefixes, repeat(128)), strict=False)
        parsed = [(ip, prefix) for text, prefix in listed if (ip := parse_ip(text)) is not None]
        return tuple(ipaddress.ip_interface(f"{ip}/{min(prefix, ip.max_prefixlen)}") for ip, prefix in parsed)


@dataclass(frozen=True)
class Choice:
    """The interfaces to listen on and to announce, and those that are not used."""

    interfaces: tuple[Interface, ...]
    """Each with only those of its addresses that are used, including scopes."""
    left_out: tuple[tuple[str, str], ...] = ()
    """The name of each other interface, and why it is not used."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses in the order to announce and to try: fastest kind of interface first, IPv4 before IPv6 within
        one."""
        return tuple(address for interface in self.interfaces for address in interface.addresses)

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can be reached."""
        return all(interface.is_loopback for interface in self.interfaces)

    def interface_of(self, address: str) -> Interface | None:
        """Return the interface that has `address` or whose network contains it; the narrowest network if there are
        several."""
        ip = parse_ip(address)
        if ip is None:
            return None
        scope = getattr(ip, "scope_id", None)
        ways = [
            (int(own) == int(ip), own.network.prefixlen, interface)
            for interface in self.interfaces
            if scope in (None, interface.name, str(interface.index))
            for own in interface.networks
            if ip in own.network
        ]
        return max(ways, key=lambda way: way[:2])[2] if ways else None

    def interface_at(self, address: str) -> Interface | None:
        """Return the interface that leads to `address`, which is `host:port`."""
        return self.interface_of(host_of(address))


def choose(listing: Sequence[Interface], wanted: Sequence[str] = (), *, strict: bool = True) -> Choice:
    """Choose all useful interfaces, or those that `wanted` lists by name, address or network (`192.168.1.0/24`).

    Without a useful interface, choose loopback. Raise `ConfigError` if a wanted interface is missing; without `strict`,
    ignore that, because an interface that was there at the start may come back.
    """
    for wish in wanted:
        if strict and all(_meant(interface, wish) is None for interface in listing):
            why = f"this machine has no such interface or address; {_what_there_is(listing)}"
            raise ConfigError("interfaces", wish, why)
    names = {interface.name: interface for interface in listing}
    chosen: list[Interface] = []
    left_out: dict[str, str] = {}
    for interface in listing:
        meant = [addresses for wish in wanted if (addresses := _meant(interface, wish)) is not None]
        usable = _with_usable(interface, [ip for addresses in meant for ip in addresses])
        if not wanted:
            why = why_not(interface, names)
        elif not meant:
            why = "it was not asked for"
        elif not interface.is_up:
            why = "it is down, or nothing is plugged in"
        else:
            why = "" if usable.addresses else "it has no usable address"
        if why and meant and strict:
            raise ConfigError("interfaces", interface.name, f"{why}; {_what_there_is(listing)}")
        if why:
            left_out[interface.name] = why
        else:
            chosen.append(usable)
    if not chosen and not wanted:
        chosen = [_with_usable(interface) for interface in listing if interface.is_loopback and interface.is_up]
        if not chosen and strict:
            why = "this machine has no network at all, not even loopback: ip link set lo up"
            raise ConfigError("interfaces", (), why)
    for interface in chosen:
        left_out.pop(interface.name, None)
    chosen.sort(key=lambda one: (_SPEED_ORDER.index(one.kind), -one.speed, one.index, one.name))
    return Choice(tuple(chosen), tuple(left_out.items()))


def why_not(interface: Interface, names: Mapping[str, Interface]) -> str:
    """Return why an interface is not used unless it is asked for; empty if it is used. `names` has all interfaces."""
    reasons = (
        (interface.is_loopback, "loopback reaches only this machine"),
        (not interface.is_up, "it is down, or nothing is plugged in"),
        (interface.foreign, f"it is for {interface.foreign}"),
        (interface.bridge, f"it is a port of the bridge {interface.bridge}"),
        (interface.tunnel, "it is a tunnel (a VPN or a virtual machine); ask for it by name to use it"),
        (interface.no_arp, "it is a virtual device with no neighbours"),
        (
            interface.is_bridge and not _leads_out(interface, names),
            "it is a bridge of containers or virtual machines, with no card in it",
        ),
        (not _with_usable(interface).addresses, "it has no address"),
    )
    return next((why for applies, why in reasons if applies), "")


def reachable(addresses: Iterable[str], choice: Choice) -> tuple[str, ...]:
    """Return the addresses that a peer reports as this machine can use them.

    A link-local IPv6 address is valid on one network only: it gets the scope of its interface, or of each one that is
    possible. Unusable addresses are dropped, and so is loopback unless this machine uses it too.
    """
    found: dict[str, None] = {}
    loopback = any(interface.is_loopback for interface in choice.interfaces)
    for text in addresses:
        ip = parse_ip(text)
        if ip is None or not (_usable(ip, loopback=False) or (loopback and _usable(ip, loopback=True))):
            continue
        if ip.version == 4 or not ip.is_link_local:
            found[str(ip).partition("%")[0]] = None
            continue
        scope = text.partition("%")[2]
        for interface in choice.interfaces:
            if scope in ("", interface.name, str(interface.index)) and not interface.is_loopback:
                found[_text(ip, interface.name)] = None
    return tuple(found)


def is_on_link(address: str, choice: Choice) -> bool:
    """Return whether `address` is on a directly connected network: that of a chosen interface, or link-local IPv6. A
    link-local IPv4 address must be in a network of this machine: 169.254.169.254 is the metadata service of clouds.
    """
    ip = parse_ip(address)
    return ip is not None and ((ip.version == 6 and ip.is_link_local) or choice.interface_of(address) is not None)


def host_of(address: str) -> str:
    """Return the host in `host:port`; empty for an invalid address, which a peer may have sent."""
    try:
        return parse_address(address)[0]
    except ConfigError:
        return ""


def parse_ip(text: str) -> IPAddress | None:
    """Return the address in `text`, which may have a scope; None if it is invalid."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _leads_out(bridge: Interface, names: Mapping[str, Interface]) -> bool:
    """Return whether a bridge contains a card, directly, in a bond or under a VLAN."""
    seen: set[str] = set()
    todo = list(bridge.ports)
    while todo:
        port = names.get(todo.pop())
        if port is None or port.name in seen:
            continue
        if port.hardware:
            return True
        seen.add(port.name)
        todo += port.ports
    return False


def _with_usable(interface: Interface, only: Sequence[IPAddress] = ()) -> Interface:
    """Return the interface with only its usable addresses, limited to `only` if given."""
    usable = [
        own
        for own in interface.networks
        if _usable(own.ip, loopback=interface.is_loopback) and (not only or own.ip in only)
    ]
    # Link-local addresses last of their version: they work on one network only and need a scope.
    kept = sorted(usable, key=lambda own: (own.version, own.ip.is_link_local))[:MAX_ADDRESSES]
    return replace(
        interface,
        addresses=tuple(_text(own.ip, interface.name) for own in kept),
        prefixes=tuple(own.network.prefixlen for own in kept),
    )


def _usable(ip: IPAddress, *, loopback: bool) -> bool:
    if loopback:
        return str(ip) in LOOPBACK_ADDRESSES
    return not (ip.is_loopback or ip.is_unspecified or ip.is_multicast or getattr(ip, "ipv4_mapped", None))


def _text(ip: IPAddress, name: str) -> str:
    bare = str(ip).partition("%")[0]
    return f"{bare}%{name}" if ip.version == 6 and ip.is_link_local else bare


def _meant(interface: Interface, wish: str) -> list[IPAddress] | None:
    """Return the addresses of `interface` that `wish` means: all if it is its name; None if it means another."""
    wish = wish.strip()
    addresses = [own.ip for own in interface.networks]
    if wish == interface.name or (wish == "loopback" and interface.is_loopback):
        return addresses
    bare, _, scope = wish.partition("%")
    try:
        network = ipaddress.ip_network(bare, strict=False)
    except ValueError:
        return None
    inside = [ip for ip in addresses if ip in network]
    return inside if inside and scope in ("", interface.name) else None


def _what_there_is(listing: Sequence[Interface]) -> str:
    there = ", ".join(f"{interface.name} ({', '.join(interface.addresses) or 'no address'})" for interface in listing)
    return f"there are {there}" if there else "there is none"
