"""What may keep a machine from finding its cluster: one check a cause, each with the fix. Pure.

`symptoms.py` looks at the machine; here what it found is judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.strangers import HOW_TO_JOIN, other_clusters
from ringfort.cluster.core.versions import differ, numbers_of, upgrade_advice
from ringfort.cluster.discovery.interfaces import Choice
from ringfort.cluster.discovery.mdns import THIS_MACHINE, interface_troubles

MDNS_PORT: Final = 5353
SMALLEST_MTU: Final = 1280
"""Bytes that IPv6 needs; less breaks it."""
USUAL_MTU: Final = 1500
"""Bytes that every Ethernet and Wi-Fi carries."""
_TCP_OVERHEAD: Final = 72
"""Bytes at most between a packet's size and the data in it that TCP agrees on: IPv6, TCP and time stamps."""
OLDEST_TORCH: Final = "2.7"
FIRST_RELEASE: Final = 1735689600.0
"""The start of 2025: a clock that says less was never set."""


class Outcome(Enum):
    """How a check went."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    """It could not be looked at."""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report."""

    name: str
    outcome: Outcome
    what: str
    fix: str = ""
    """What to do; empty if nothing."""


@dataclass(frozen=True, kw_only=True)
class Torch:
    """The torch that is installed beside Ringfort."""

    version: str
    cuda: str = ""
    """The version of CUDA that it was built for; empty for none."""
    knows_ringfort: bool = True
    """Whether it finds the backend `ringfort`."""
    devices: tuple[str, ...] | None = None
    """The GPUs that it can use; None where it was not asked."""
    error: str = ""
    """Why it could not be asked."""


@dataclass(frozen=True, kw_only=True)
class Symptoms:
    """What was found on a machine. Texts of errors are empty where there was none."""

    choice: Choice | None
    choice_error: str = ""
    """Why no interface could be chosen."""
    multicast: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each interface why its own multicast was not heard on it."""
    announced: tuple[str, ...] = ()
    """An address of each machine on which peers of this cluster announce themselves."""
    strangers: tuple[str, ...] = ()
    """An address of each machine on which peers of other clusters do."""
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
    firewall_hidden: tuple[str, ...] = ()
    """Those tools that are here and answer root alone."""
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
    torch: Torch | None = None
    """None where it is not installed."""
    accelerators: tuple[str, ...] = ()
    platform: str = "linux"
    """As `sys.platform` has it."""


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
        *check_torch(found),
        *check_gpu(found),
        *check_permission(found),
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
    heard = _elsewhere((*found.announced, *found.strangers))
    if heard:
        yield Check(name, Outcome.PASS, f"{', '.join(heard)} {_are(len(heard))} heard: the network carries it")
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
            Outcome.UNKNOWN,
            "nobody else is heard, so it is not known whether the network carries it",
            "run this again while Ringfort runs on another machine",
        )


def check_peers(found: Symptoms) -> Iterable[Check]:
    """Who of the cluster is there, as far as this machine can tell?"""
    name = "peers"
    for refusal in found.refusals:
        why, _, fix = refusal.partition("; ")
        yield Check(name, Outcome.WARN, f"not met: {why}", fix or "`ringfort doctor` there says more")
    others = _elsewhere(found.met)
    if found.met:
        yield Check(name, Outcome.PASS, f"met: {', '.join(found.met)}")
    elif not (found.key and found.cluster):
        yield Check(
            name, Outcome.UNKNOWN, "nobody was looked for: this machine is in no cluster yet", "see `key` below"
        )
    elif not found.strangers:
        yield Check(
            name,
            Outcome.UNKNOWN,
            "nobody is there now: machines are there while a program runs (`ringfort run`, join)",
            "run this again while Ringfort runs on another machine",
        )
    if found.strangers:
        alone = "" if others else ", and none of this one"
        what = f"{other_clusters(found.strangers)}{alone}"
        yield Check(name, Outcome.PASS if others else Outcome.WARN, what, "" if others else HOW_TO_JOIN)


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
        yield Check(name, Outcome.PASS, f"this machine can connect to itself at {', '.join(good)}")
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
    if found.firewall_hidden:
        commands = "; ".join(_FIREWALL_LOOK[tool] for tool in found.firewall_hidden if tool in _FIREWALL_LOOK)
        what = f"{', '.join(found.firewall_hidden)} may only be looked at by root"
        yield Check(name, Outcome.UNKNOWN, what, f"look at it: {commands}" if commands else "look at it as root")
    elif not found.firewall:
        what = f"none of {', '.join(_FIREWALL_FIX)} is here to ask, so it is not known whether one is on"
        yield Check(name, Outcome.UNKNOWN, what, "if others cannot connect to this machine, look for a firewall")
    elif not closed:
        yield Check(name, Outcome.PASS, f"{', '.join(found.firewall)}: nothing that keeps others out")


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
    """Do all have the same Ringfort?"""
    name = "version"
    others = {peer: version for peer, version in found.met.items() if differ(found.version, version)}
    for peer, version in others.items():
        yield Check(name, Outcome.WARN, *upgrade_advice(found.version, peer, version))
    if not others:
        with_whom = "; so has every peer that was met" if found.met else ""
        yield Check(name, Outcome.PASS, f"this machine has Ringfort {found.version or 'from a folder'}{with_whom}")


def check_torch(found: Symptoms) -> Iterable[Check]:
    """Does torch know the backend?"""
    name, torch = "torch", found.torch
    if torch is None:
        yield Check(
            name, Outcome.PASS, "not installed; only programs that use it need it (pip install 'ringfort[torch]')"
        )
        return
    if numbers_of(torch.version) < numbers_of(OLDEST_TORCH):
        what = f"torch {torch.version} is older than {OLDEST_TORCH}, the oldest that the backend works with"
        yield Check(name, Outcome.WARN, what, "pip install --upgrade torch")
    elif not torch.knows_ringfort:
        what = f"torch {torch.version} does not find the backend `ringfort`"
        yield Check(name, Outcome.WARN, what, "pip install ringfort, in the environment that has torch")
    else:
        built = f"for CUDA {torch.cuda}" if torch.cuda else "for the CPU"
        yield Check(name, Outcome.PASS, f"torch {torch.version}, built {built}, knows the backend `ringfort`")


def check_gpu(found: Symptoms) -> Iterable[Check]:
    """Can torch use the GPU that is there?"""
    name, torch = "gpu", found.torch
    if not found.accelerators:
        yield Check(name, Outcome.PASS, "no GPU of NVIDIA or Apple was found: programs run on the CPU")
        return
    here = ", ".join(found.accelerators)
    if torch is None or found.platform == "darwin":
        yield Check(name, Outcome.PASS, here)
    elif not torch.cuda:
        what = f"{here}, and torch {torch.version} cannot use it: it is built for the CPU"
        yield Check(name, Outcome.WARN, what, "install a torch built for CUDA: https://pytorch.org/get-started/locally")
    elif torch.devices is None:
        what = f"{here}; torch could not be asked whether it can use it ({torch.error})"
        yield Check(name, Outcome.UNKNOWN, what, "python -c 'import torch; print(torch.cuda.get_device_name())'")
    elif not torch.devices:
        what = f"{here}, and torch, built for CUDA {torch.cuda}, cannot use it"
        yield Check(
            name, Outcome.WARN, what, "compare with the driver's CUDA version in `nvidia-smi`: it must be as new"
        )
    else:
        yield Check(name, Outcome.PASS, f"torch can use {', '.join(torch.devices)}")


def check_permission(found: Symptoms) -> Iterable[Check]:
    """Does macOS let programs speak with the local network? It says nothing when it does not."""
    name = "permission"
    if found.platform != "darwin":
        return
    if _elsewhere((*found.announced, *found.strangers, *found.met)):
        yield Check(name, Outcome.PASS, "macOS lets this program use the local network: others are heard")
    else:
        yield Check(
            name,
            Outcome.UNKNOWN,
            "macOS 15 and later keep a program from the local network, without a word, until a person allows it",
            "System Settings, Privacy & Security, Local Network: switch on the app that starts Python (terminal, "
            "editor), then start that app again",
        )


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
_FIREWALL_LOOK: Final[Mapping[str, str]] = {
    "ufw": "sudo ufw status",
    "firewalld": "sudo firewall-cmd --state",
    "iptables": "sudo iptables -S INPUT",
    "nft": "sudo nft list ruleset",
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


def _elsewhere(machines: Iterable[str]) -> list[str]:
    """Those that are not this machine."""
    return [one for one in machines if not one.startswith(THIS_MACHINE)]


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _open_mdns() -> str:
    return f"let UDP port {MDNS_PORT} in through this machine's firewall"


def _set_mtu(interface: str) -> str:
    return f"ip link set dev {interface} mtu {USUAL_MTU}"
