"""What may keep a machine from its cluster: one check for each cause, with its fix. Pure.

`findings.py` looks at the machine; the checks judge what it found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.other_clusters import HOW_TO_JOIN, describe_other_clusters
from ringfort.cluster.core.versions import differ, numbers_of, upgrade_advice
from ringfort.cluster.discovery.interfaces import Choice
from ringfort.cluster.discovery.mdns import THIS_MACHINE, interface_troubles

MDNS_PORT: Final = 5353
SMALLEST_MTU: Final = 1280
"""Bytes: the minimum for IPv6."""
USUAL_MTU: Final = 1500
"""Bytes: what every Ethernet and Wi-Fi carries."""
_TCP_OVERHEAD: Final = 72
"""Bytes at most between the size of a packet and the TCP segment in it: headers of IPv6 and TCP, and time stamps."""
OLDEST_TORCH: Final = "2.7"
FIRST_RELEASE: Final = 1735689600.0
"""The start of 2025. A clock that shows less was never set."""
_TRY_AGAIN: Final = "run this again while Ringfort runs on another machine"


class Outcome(Enum):
    """The result of a check."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    """It could not be checked."""


class Check(NamedTuple):
    """One line of the doctor's report."""

    name: str
    outcome: Outcome
    what: str
    fix: str = ""
    """What to do; empty if nothing."""


class Firewall(NamedTuple):
    """How to look at one kind of firewall, and how to open it."""

    command: tuple[str, ...]
    """Prints its state."""
    closed: re.Pattern[str]
    """Matches that output if the firewall may block peers."""
    fix: str


FIREWALLS: Final[Mapping[str, Firewall]] = {
    "ufw": Firewall(
        ("ufw", "status"),
        re.compile(r"^Status: active|^ENABLED=yes", re.MULTILINE),
        f"ufw allow {MDNS_PORT}/udp, and ufw allow from your network (such as 192.168.1.0/24) to any proto tcp",
    ),
    "firewalld": Firewall(
        ("firewall-cmd", "--state"),
        re.compile(r"^running", re.MULTILINE),
        "firewall-cmd --zone=home --change-interface=NAME, and --add-service=mdns --permanent",
    ),
    "iptables": Firewall(
        ("iptables", "-S", "INPUT"),
        re.compile(r"^-P INPUT (DROP|REJECT)|^-A INPUT -j (DROP|REJECT)", re.MULTILINE),
        f"iptables -I INPUT -p udp --dport {MDNS_PORT} -j ACCEPT, and -s your network -p tcp -j ACCEPT",
    ),
    "nft": Firewall(
        ("nft", "list", "ruleset"),
        re.compile(r"hook input[^}]*?policy drop|hook input[^}]*?\n\s*(drop|reject)\b"),
        f"accept udp dport {MDNS_PORT}, and tcp from your network, in the chain with `hook input`",
    ),
    "macOS": Firewall(
        ("/usr/libexec/ApplicationFirewall/socketfilterfw", "--getglobalstate"),
        re.compile(r"enabled|State = [12]"),
        "System Settings, Network, Firewall, Options: let python3 receive incoming connections",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Torch:
    """The torch that is installed beside Ringfort."""

    version: str
    cuda: str = ""
    """The version of CUDA that it was built for; empty for none."""
    knows_ringfort: bool = True
    """Whether it finds the backend `ringfort`."""
    devices: tuple[str, ...] | None = None
    """The GPUs that it can use; None if it was not asked."""
    error: str = ""
    """Why it could not be asked."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found on a machine. Error texts are empty if there was no error."""

    choice: Choice | None
    choice_error: str = ""
    """Why no interface could be chosen."""
    multicast: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each interface, why its own multicast was not received on it."""
    announced: tuple[str, ...] = ()
    """An address of each machine that announces peers of this cluster."""
    other_clusters: tuple[str, ...] = ()
    """An address of each machine that announces peers of other clusters."""
    mdns_error: tuple[str, str] | None = None
    """Why mDNS could not be started, and the fix."""
    ports: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each address of this machine, why it cannot be connected to."""
    peers: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each address that a person named, why nothing answers there."""
    segments: Mapping[str, int] = field(default_factory=dict[str, int])
    """For each such address that answered, the maximum segment size that TCP agreed on; 0 if unknown."""
    firewall: Mapping[str, str] = field(default_factory=dict[str, str])
    """What each firewall tool printed."""
    firewall_hidden: tuple[str, ...] = ()
    """The tools that are installed and answer only root."""
    clock: float = FIRST_RELEASE
    """Seconds since 1970, by this machine's clock."""
    key: str = ""
    """The short id of this node; empty if it has no key yet."""
    key_error: tuple[str, str] | None = None
    """Why the key or the secret cannot be used, and the fix."""
    cluster: str = ""
    """The name of the cluster in use; empty if there is none yet."""
    version: str = ""
    met: Mapping[str, str] = field(default_factory=dict[str, str])
    """The version of each peer that was connected and proved to be a member of this cluster."""
    refusals: tuple[str, ...] = ()
    """Who was found but not connected, and why."""
    torch: Torch | None = None
    """None if it is not installed."""
    accelerators: tuple[str, ...] = ()
    platform: str = "linux"
    """As in `sys.platform`."""


Result = tuple[Outcome, str, str]
"""The outcome of a check, what was found, and the fix."""


def run_checks(found: Findings) -> list[Check]:
    """Return the results of all checks, in the order in which their fixes should be tried."""
    return [Check(name, *result) for name, check in _CHECKS.items() for result in check(found)]


def _interfaces(found: Findings) -> Iterator[Result]:
    """Can this machine reach others at all?"""
    if found.choice is None:
        yield Outcome.FAIL, found.choice_error, "unset RINGFORT_INTERFACES, or name one that is there"
        return
    left_out = "; ".join(f"{other}: {why}" for other, why in found.choice.left_out)
    if found.choice.is_loopback:
        what = f"only this machine can be reached{f' ({left_out})' if left_out else ''}"
        fix = "connect a cable or join a Wi-Fi network; if it is another kind, name it in RINGFORT_INTERFACES"
        yield Outcome.WARN, what, fix
        return
    for interface in found.choice.interfaces:
        speed = f", {interface.speed} Mbit/s" if interface.speed else ""
        yield Outcome.PASS, f"{interface.name} ({interface.kind.value}{speed}): {', '.join(interface.addresses)}", ""
    if all(interface.kind is LinkKind.WIFI for interface in found.choice.interfaces):
        yield Outcome.WARN, "only Wi-Fi is connected", "use a cable if you can: it is 5 to 40 times faster"
    if left_out:
        yield Outcome.PASS, f"not used: {left_out}", ""


def _multicast(found: Findings) -> Iterator[Result]:
    """Can peers find this machine without being given its address?"""
    if found.mdns_error is not None:
        yield Outcome.FAIL, *found.mdns_error
        return
    troubles = {trouble.interface: trouble for trouble in (interface_troubles(found.choice) if found.choice else [])}
    for interface, why in found.multicast.items():
        if interface in troubles:
            yield Outcome.FAIL, troubles[interface].what, troubles[interface].fix
        elif why:
            fix = f"let UDP port {MDNS_PORT} in through this machine's firewall, or name a peer with --peer"
            yield Outcome.FAIL, f"{interface}: {why}", fix
        else:
            yield Outcome.PASS, f"{interface}: sent, and received by this machine itself", ""
    heard = _elsewhere((*found.announced, *found.other_clusters))
    if heard:
        verb = "is" if len(heard) == 1 else "are"
        yield Outcome.PASS, f"{', '.join(heard)} {verb} heard: the network carries multicast", ""
    elif found.met:
        what = (
            f"{', '.join(found.met)} can be reached by address but is not heard: the network between does not carry "
            "multicast, or it is switched off there"
        )
        fix = "switch off client isolation or IGMP snooping in the router or access point, or continue with --peer"
        yield Outcome.WARN, what, fix
    else:
        what = "no other machine is heard, so it is not known whether the network carries it"
        yield Outcome.UNKNOWN, what, _TRY_AGAIN


def _ports(found: Findings) -> Iterator[Result]:
    """Can connections be made to this machine, and to the peers that a person named?"""
    for address, why in found.ports.items():
        if why:
            yield Outcome.FAIL, f"{address}: {why}", "let Python accept connections in this machine's firewall"
    good = [address for address, why in found.ports.items() if not why]
    if good:
        yield Outcome.PASS, f"this machine can connect to itself at {', '.join(good)}", ""
    for address, why in found.peers.items():
        if why:
            fix = "is Ringfort running there, is the address right, and does its firewall let the port through?"
            yield Outcome.FAIL, f"{address}: {why}", fix
        else:
            yield Outcome.PASS, f"{address} answers", ""


def _peers(found: Findings) -> Iterator[Result]:
    """Which peers of the cluster are present?"""
    for refusal in found.refusals:
        why, _, fix = refusal.partition("; ")
        yield Outcome.WARN, f"not connected: {why}", fix or "`ringfort doctor` there says more"
    if found.met:
        yield Outcome.PASS, f"connected: {', '.join(found.met)}", ""
    elif not (found.key and found.cluster):
        yield Outcome.UNKNOWN, "no peer was looked for: this machine is in no cluster yet", "see `key` below"
    elif not found.other_clusters:
        what = "no peer is there now: machines are there while a program runs (`ringfort run`, join)"
        yield Outcome.UNKNOWN, what, _TRY_AGAIN
    if found.other_clusters:
        if _elsewhere(found.met):
            yield Outcome.PASS, describe_other_clusters(found.other_clusters), ""
        else:
            yield Outcome.WARN, f"{describe_other_clusters(found.other_clusters)}, and none of this one", HOW_TO_JOIN


def _firewall(found: Findings) -> Iterator[Result]:
    """Does a firewall on this machine block peers? Firewalls in the network cannot be examined."""
    closed = [tool for tool, text in found.firewall.items() if FIREWALLS[tool].closed.search(text)]
    for tool in closed:
        yield Outcome.WARN, f"{tool} is on and may block peers", FIREWALLS[tool].fix
    if found.firewall_hidden:
        commands = "; ".join(f"sudo {' '.join(FIREWALLS[tool].command)}" for tool in found.firewall_hidden)
        yield Outcome.UNKNOWN, f"{', '.join(found.firewall_hidden)} can only be examined by root", f"run: {commands}"
    elif not found.firewall:
        what = f"none of {', '.join(FIREWALLS)} is installed, so it is not known whether one is on"
        yield Outcome.UNKNOWN, what, "if others cannot connect to this machine, look for a firewall"
    elif not closed:
        yield Outcome.PASS, f"{', '.join(found.firewall)}: nothing that blocks peers", ""


def _mtu(found: Findings) -> Iterator[Result]:
    """Do packets have the size that all machines of the network expect?"""
    for interface in found.choice.interfaces if found.choice else ():
        what = f"{interface.name}: packets of {interface.mtu} bytes"
        fix = f"ip link set dev {interface.name} mtu {USUAL_MTU}"
        if interface.is_loopback:
            continue
        if interface.mtu < SMALLEST_MTU:
            yield Outcome.FAIL, f"{what} are too small for IPv6", fix
        elif interface.mtu > USUAL_MTU:
            fix = f"set the same on every machine and switch of that network, or here: {fix}"
            yield Outcome.WARN, f"{what}: every machine there needs the same, or large messages hang", fix
        else:
            yield Outcome.PASS, what, ""
    for address, segment in found.segments.items():
        interface = found.choice.interface_at(address) if found.choice else None
        if interface is not None and segment and segment + _TCP_OVERHEAD < interface.mtu:
            what = f"{address} takes packets of about {segment + 52} bytes, and {interface.name} has {interface.mtu}"
            yield Outcome.WARN, what, "give both machines the same MTU"


def _key(found: Findings) -> Iterator[Result]:
    """Does this machine have an identity and a cluster?"""
    who = f"this node is {found.key}" if found.key else "this node has no key yet; the first use creates it"
    if found.key_error is not None:
        yield Outcome.FAIL, *found.key_error
    elif found.cluster:
        yield Outcome.PASS, f"{who}, in the cluster {found.cluster!r}", ""
    else:
        fix = "ringfort key join, with the code of `ringfort key show` on a machine that is in one; or ringfort key new"
        yield Outcome.WARN, f"{who}, and it is in no cluster yet", fix


def _version(found: Findings) -> Iterator[Result]:
    """Do all machines have the same version of Ringfort?"""
    others = {peer: version for peer, version in found.met.items() if differ(found.version, version)}
    for peer, version in others.items():
        yield Outcome.WARN, *upgrade_advice(found.version, peer, version)
    if not others:
        same = "; so has every connected peer" if found.met else ""
        yield Outcome.PASS, f"this machine has Ringfort {found.version or 'from a folder'}{same}", ""


def _torch(found: Findings) -> Iterator[Result]:
    """Does torch find the backend?"""
    torch = found.torch
    if torch is None:
        yield Outcome.PASS, "not installed; only programs that use it need it (pip install 'ringfort[torch]')", ""
    elif numbers_of(torch.version) < numbers_of(OLDEST_TORCH):
        what = f"torch {torch.version} is older than {OLDEST_TORCH}, the oldest that the backend works with"
        yield Outcome.WARN, what, "pip install --upgrade torch"
    elif not torch.knows_ringfort:
        what = f"torch {torch.version} does not find the backend `ringfort`"
        yield Outcome.WARN, what, "pip install ringfort, in the environment that has torch"
    else:
        built = f"for CUDA {torch.cuda}" if torch.cuda else "for the CPU"
        yield Outcome.PASS, f"torch {torch.version}, built {built}, knows the backend `ringfort`", ""


def _gpu(found: Findings) -> Iterator[Result]:
    """Can torch use the GPU?"""
    torch, gpus = found.torch, ", ".join(found.accelerators)
    if not gpus:
        yield Outcome.PASS, "no GPU of NVIDIA or Apple was found: programs run on the CPU", ""
    elif torch is None or found.platform == "darwin":
        yield Outcome.PASS, gpus, ""
    elif not torch.cuda:
        what = f"{gpus}, and torch {torch.version} cannot use it: it is built for the CPU"
        yield Outcome.WARN, what, "install a torch built for CUDA: https://pytorch.org/get-started/locally"
    elif torch.devices is None:
        what = f"{gpus}; torch could not be asked whether it can use it ({torch.error})"
        yield Outcome.UNKNOWN, what, "python -c 'import torch; print(torch.cuda.get_device_name())'"
    elif not torch.devices:
        what = f"{gpus}, and torch, built for CUDA {torch.cuda}, cannot use it"
        yield Outcome.WARN, what, "compare with the driver's CUDA version in `nvidia-smi`: it must be as new"
    else:
        yield Outcome.PASS, f"torch can use {', '.join(torch.devices)}", ""


def _permission(found: Findings) -> Iterator[Result]:
    """Does macOS let programs use the local network? It does not say so if it does not."""
    if found.platform != "darwin":
        return
    if _elsewhere((*found.announced, *found.other_clusters, *found.met)):
        yield Outcome.PASS, "macOS lets this program use the local network: other machines are heard", ""
    else:
        what = "macOS 15 and later silently block a program from the local network until a person allows it"
        fix = (
            "System Settings, Privacy & Security, Local Network: switch on the app that starts Python (terminal, "
            "editor), then start that app again"
        )
        yield Outcome.UNKNOWN, what, fix


def _clock(found: Findings) -> Iterator[Result]:
    """Is the clock roughly right? Only logs need it: no protocol here relies on a clock."""
    if found.clock < FIRST_RELEASE:
        fix = "set the clock by the network: timedatectl set-ntp true (Linux), sntp -sS time.apple.com (macOS)"
        yield Outcome.WARN, "this machine's clock was never set", fix
    else:
        yield Outcome.PASS, "this machine's clock is set", ""


_CHECKS: Final[Mapping[str, Callable[[Findings], Iterable[Result]]]] = {
    "interfaces": _interfaces,
    "multicast": _multicast,
    "ports": _ports,
    "peers": _peers,
    "firewall": _firewall,
    "mtu": _mtu,
    "key": _key,
    "version": _version,
    "torch": _torch,
    "gpu": _gpu,
    "permission": _permission,
    "clock": _clock,
}


def _elsewhere(machines: Iterable[str]) -> list[str]:
    """Return those that are not this machine."""
    return [one for one in machines if not one.startswith(THIS_MACHINE)]
