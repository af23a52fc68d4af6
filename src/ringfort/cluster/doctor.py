"""What may keep a machine from finding its cluster: one check a cause, each with the fix. Pure.

`symptoms.py` looks at the machine; here what it found is judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from ringfort.cluster.discovery.interfaces import Choice
from ringfort.cluster.discovery.mdns import interface_troubles
from ringfort.cluster.kinds import LinkKind

MDNS_PORT: Final = 5353
SMALLEST_MTU: Final = 1280
"""Bytes that IPv6 needs; less breaks it."""
USUAL_MTU: Final = 1500
"""Bytes that every Ethernet and Wi-Fi carries."""
_TCP_OVERHEAD: Final = 72
"""Bytes at most between a packet's size and the data in it that TCP agrees on: IPv6, TCP and time stamps."""
FIRST_RELEASE: Final = 1735689600.0
"""The start of 2025: a clock that says less was never set."""


class Outcome(Enum):
    """How a check went."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report."""

    name: str
    outcome: Outcome
    what: str
    fix: str = ""
    """What to do; empty if nothing."""


@dataclass(frozen=True, kw_only=True)
class Symptoms:
    """What was found on a machine. Texts of errors are empty where there was none."""

    choice: Choice | None
    choice_error: str = ""
    """Why no interface could be chosen."""
    multicast: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each interface why its own multicast was not heard on it."""
    announced: int = 0
    """Peers of this cluster that announce themselves."""
    strangers: int = 0
    """Peers of other clusters that do."""
    mdns_error: tuple[str, str] | None = None
    """What and fix, where mDNS could not be started."""
    ports: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each own address why it cannot be listened on and connected to."""
    peers: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each address that a person named why nobody answers there."""
    segments: Mapping[str, int] = field(default_factory=dict[str, int])
    """For each such address that answered the bytes of data in a packet that both sides agreed on; 0 if not known."""
    firewall: Mapping[str, str] = field(default_factory=dict[str, str])
    """What each firewall tool printed."""
    clock: float = FIRST_RELEASE
    """Seconds since 1970, as this machine has it."""
    key: str = ""
    """The short id of this node; empty if there is none yet."""
    key_error: tuple[str, str] | None = None
    """What and fix, where the key or the secret cannot be used."""
    cluster: str = ""
    """The name of the cluster in use; empty if there is none yet."""
    version: str = ""
    met: Mapping[str, str] = field(default_factory=dict[str, str])
    """The version of each peer that was met: found, connected and proved to be of this cluster."""
    refusals: tuple[str, ...] = ()
    """Who was found and not met, and why."""


def examine(found: Symptoms) -> list[Check]:
    """All checks, in the order in which their fixes should be tried."""
    return [
        *check_interfaces(found),
        *check_multicast(found),
        *check_ports(found),
        *check_peers(found),
        *check_firewall(found),
        *check_mtu(found),
        *check_key(found),
        *check_version(found),
        *check_clock(found),
    ]


def check_interfaces(found: Symptoms) -> Iterable[Check]:
    """Is there a way to other machines at all?"""
    name = "interfaces"
    if found.choice is None:
        yield Check(name, Outcome.FAIL, found.choice_error, "unset RINGFORT_INTERFACES, or name one that is there")
        return
    left_out = "; ".join(f"{other}: {why}" for other, why in found.choice.left_out)
    if found.choice.is_loopback:
        yield Check(
            name,
            Outcome.WARN,
            f"only this machine can be reached{f' ({left_out})' if left_out else ''}",
            "connect a cable or join a Wi-Fi network; if it is another kind, name it in RINGFORT_INTERFACES",
        )
        return
    for interface in found.choice.interfaces:
        speed = f", {interface.speed} Mbit/s" if interface.speed else ""
        what = f"{interface.name} ({interface.kind.value}{speed}): {', '.join(interface.addresses)}"
        yield Check(name, Outcome.PASS, what)
    if all(interface.kind is LinkKind.WIFI for interface in found.choice.interfaces):
        yield Check(name, Outcome.WARN, "only Wi-Fi is connected", "use a cable if you can: it is 5 to 40 times faster")
    if left_out:
        yield Check(name, Outcome.PASS, f"not used: {left_out}")


def check_multicast(found: Symptoms) -> Iterable[Check]:
    """Can others hear us without being told where we are?"""
    name = "multicast"
    if found.mdns_error is not None:
        yield Check(name, Outcome.FAIL, *found.mdns_error)
        return
    troubles = interface_troubles(found.choice) if found.choice else []
    silent = {trouble.interface: trouble for trouble in troubles}
    for interface, why in found.multicast.items():
        if interface in silent:
            yield Check(name, Outcome.FAIL, silent[interface].what, silent[interface].fix)
        elif why:
            yield Check(name, Outcome.FAIL, f"{interface}: {why}", f"{_open_mdns()}, or name a peer with --peer")
        else:
            yield Check(name, Outcome.PASS, f"{interface}: sent, and heard by this machine itself")
    if found.announced or found.strangers:
        others = f", and {found.strangers} of other clusters" if found.strangers else ""
        yield Check(name, Outcome.PASS, f"{found.announced} other peers of this cluster are heard{others}")
    elif found.met:
        yield Check(
            name,
            Outcome.WARN,
            f"{', '.join(found.met)} can be reached by address but is not heard: the network between does not carry "
            "multicast, or it is off there",
            "switch off client isolation or IGMP snooping in the router or access point, or go on with --peer",
        )
    else:
        yield Check(
            name,
            Outcome.PASS,
            "nobody else is heard, so it is not known whether the network carries it; run this again while Ringfort "
            "runs on another machine",
        )


def check_peers(found: Symptoms) -> Iterable[Check]:
    """Who of the cluster is there, as far as this machine can tell?"""
    name = "peers"
    for refusal in found.refusals:
        fix = "`ringfort key show` on one machine and `ringfort key join` on the other, if both are yours"
        yield Check(name, Outcome.WARN, f"not met: {refusal}", fix)
    if found.met:
        yield Check(name, Outcome.PASS, f"met: {', '.join(found.met)}")
    elif not (found.key and found.cluster):
        yield Check(name, Outcome.PASS, "none was looked for: this machine is in no cluster yet")
    else:
        yield Check(name, Outcome.PASS, "none is there now; they are there while a program runs (`ringfort run`, join)")


def check_ports(found: Symptoms) -> Iterable[Check]:
    """Can a connection be made to us, and to those who were named?"""
    name = "ports"
    for address, why in found.ports.items():
        if why:
            yield Check(
                name, Outcome.FAIL, f"{address}: {why}", "let Python accept connections in this machine's firewall"
            )
    good = [address for address, why in found.ports.items() if not why]
    if good:
        yield Check(name, Outcome.PASS, f"listened on and connected to: {', '.join(good)}")
    for address, why in found.peers.items():
        if why:
            yield Check(
                name,
                Outcome.FAIL,
                f"{address}: {why}",
                "is Ringfort running there, is the address right, and does its firewall let the port through?",
            )
        else:
            yield Check(name, Outcome.PASS, f"{address} answers")


def check_firewall(found: Symptoms) -> Iterable[Check]:
    """Is there one on this machine that keeps others out? Networks are not asked: they cannot be."""
    name = "firewall"
    closed = [tool for tool, text in found.firewall.items() if _is_closed(tool, text)]
    for tool in closed:
        yield Check(name, Outcome.WARN, f"{tool} is on and may keep peers out", _FIREWALL_FIX[tool])
    if not closed:
        what = (
            "none that keeps others out was found" if found.firewall else "none was found, or it may not be looked at"
        )
        yield Check(name, Outcome.PASS, what)


def check_mtu(found: Symptoms) -> Iterable[Check]:
    """Do packets have the size that all machines of the network expect?"""
    name = "mtu"
    for interface in found.choice.interfaces if found.choice else ():
        if interface.is_loopback:
            continue
        what = f"{interface.name}: packets of {interface.mtu} bytes"
        if interface.mtu < SMALLEST_MTU:
            yield Check(name, Outcome.FAIL, f"{what} are too small for IPv6", _set_mtu(interface.name))
        elif interface.mtu > USUAL_MTU:
            fix = f"set the same on every machine and switch of that network, or here: {_set_mtu(interface.name)}"
            yield Check(name, Outcome.WARN, f"{what} must be so on every machine there, or large messages hang", fix)
        else:
            yield Check(name, Outcome.PASS, what)
    for address, segment in found.segments.items():
        host = address.rpartition(":")[0].strip("[]")
        interface = found.choice.interface_of(host) if found.choice else None
        if interface is not None and segment and segment + _TCP_OVERHEAD < interface.mtu:
            yield Check(
                name,
                Outcome.WARN,
                f"{address} takes packets of about {segment + 52} bytes, and {interface.name} has {interface.mtu}",
                "give both machines the same MTU",
            )


def check_key(found: Symptoms) -> Iterable[Check]:
    """Does this machine have an identity and a cluster?"""
    name = "key"
    if found.key_error is not None:
        yield Check(name, Outcome.FAIL, *found.key_error)
        return
    who = f"this node is {found.key}" if found.key else "this node has no key yet; the first use makes it"
    if found.cluster:
        yield Check(name, Outcome.PASS, f"{who}, in the cluster {found.cluster!r}")
    else:
        yield Check(
            name,
            Outcome.WARN,
            f"{who}, and it is in no cluster yet",
            "ringfort key join, with the code of `ringfort key show` on a machine that is in one; or ringfort key new",
        )


def check_version(found: Symptoms) -> Iterable[Check]:
    """Do all speak the same?"""
    name = "version"
    others = {peer: version for peer, version in found.met.items() if version != found.version}
    for peer, version in others.items():
        yield Check(
            name,
            Outcome.WARN,
            f"{peer} has Ringfort {version}, this machine {found.version}",
            "pip install --upgrade ringfort, on both",
        )
    if not others:
        with_whom = f", as {len(found.met)} others have" if found.met else ""
        yield Check(name, Outcome.PASS, f"Ringfort {found.version or 'from a folder'}{with_whom}")


def check_clock(found: Symptoms) -> Iterable[Check]:
    """Is it about now? Only logs need it: no protocol here trusts a clock."""
    name = "clock"
    fix = "set the clock by the network: timedatectl set-ntp true (Linux), sntp -sS time.apple.com (macOS)"
    if found.clock < FIRST_RELEASE:
        yield Check(name, Outcome.WARN, "this machine's clock was never set", fix)
        return
    yield Check(name, Outcome.PASS, "this machine's clock is set")


_FIREWALL_FIX: Final[Mapping[str, str]] = {
    "ufw": f"ufw allow {MDNS_PORT}/udp, and ufw allow from your network (such as 192.168.1.0/24) to any proto tcp",
    "firewalld": "firewall-cmd --zone=home --change-interface=NAME, and --add-service=mdns --permanent",
    "iptables": f"iptables -I INPUT -p udp --dport {MDNS_PORT} -j ACCEPT, and -s your network -p tcp -j ACCEPT",
    "nft": f"accept udp dport {MDNS_PORT}, and tcp from your network, in the chain with `hook input`",
    "macOS": "System Settings, Network, Firewall, Options: let python3 receive incoming connections",
}
_CLOSED: Final[Mapping[str, re.Pattern[str]]] = {
    "ufw": re.compile(r"^Status: active|^ENABLED=yes", re.MULTILINE),
    "firewalld": re.compile(r"^running", re.MULTILINE),
    "iptables": re.compile(r"^-P INPUT (DROP|REJECT)|^-A INPUT -j (DROP|REJECT)", re.MULTILINE),
    "nft": re.compile(r"hook input[^}]*?policy drop|hook input[^}]*?\n\s*(drop|reject)\b"),
    "macOS": re.compile(r"enabled|State = [12]"),
}


def _is_closed(tool: str, text: str) -> bool:
    return tool in _CLOSED and _CLOSED[tool].search(text) is not None


def _open_mdns() -> str:
    return f"let UDP port {MDNS_PORT} in through this machine's firewall"


def _set_mtu(interface: str) -> str:
    return f"ip link set dev {interface} mtu {USUAL_MTU}"
