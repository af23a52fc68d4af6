"""Reads the network interfaces of this machine from the system, and watches them. `interfaces.py` judges them.

psutil has addresses and flags on every system. The kind of an interface is in /sys/class/net on Linux and in the output
of `networksetup` on macOS; elsewhere, only the name is known.
"""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.discovery.interfaces import Choice, Interface, choose, parse_ip

SYS_CLASS_NET: Final = Path("/sys/class/net")
WATCH_PERIOD: Final = 0.5
"""Seconds between two checks of the interfaces; each takes a millisecond."""

_ARPHRD_ETHER: Final = 1
"""`type` in /sys of everything that looks like Ethernet, including Wi-Fi."""
_TOOL_TIMEOUT: Final = 2.0
"""Seconds for `networksetup`, which usually takes 0.1 s."""

_FOREIGN: Final = (
    (re.compile(r"(awdl|llw)\d"), "AirDrop"),
    (re.compile(r"anpi\d"), "the Mac's own chips"),
    (re.compile(r"ap\d"), "a Mac's access point"),
    (re.compile(r"(vmnet|vboxnet)\d"), "virtual machines"),
    (re.compile(r"cali\w|cilium_|flannel\."), "containers"),
)
"""Names of interfaces that otherwise look like a card, and their purpose."""

_TUNNEL_NAMES: Final = ("utun", "ipsec", "gif", "stf", "tailscale", "zt", "wg")
"""Names of tunnels on systems that do not mark them."""


def list_interfaces(folder: Path = SYS_CLASS_NET) -> list[Interface]:
    """Return all interfaces, useful or not, in the system's order. This takes about a millisecond."""
    import psutil  # not at the top: the command line starts without it

    stats = psutil.net_if_stats()
    indexes = {name: index for index, name in socket.if_nameindex()}
    ports = _mac_ports()
    found: list[Interface] = []
    for name, addresses in psutil.net_if_addrs().items():
        if name not in stats:  # it disappeared between the two calls
            continue
        flags = frozenset(str(getattr(stats[name], "flags", "")).split(","))
        listed = [one for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
        interface = Interface(
            name=name,
            index=indexes.get(name, 0),
            addresses=tuple(one.address for one in listed),
            prefixes=tuple(_prefix_length(one.netmask) for one in listed),
            is_up=stats[name].isup,
            multicast="multicast" in flags,
            mtu=stats[name].mtu,
            speed=stats[name].speed,
            **_nature(name, flags, folder / name, ports),
        )
        found.append(interface)
    return found


async def watch_interfaces(
    current: Choice,
    wanted: Sequence[str],
    on_change: Callable[[Choice], None],
    *,
    period: float = WATCH_PERIOD,
    read: Callable[[], list[Interface]] = list_interfaces,
) -> None:
    """Call `on_change` with the new choice whenever it changes, until cancelled: a cable, another Wi-Fi, a new address.

    The new choice may contain no interface if all that were asked for are gone.
    """
    while True:
        await asyncio.sleep(period)
        choice = choose(read(), wanted, strict=False)
        if choice.interfaces != current.interfaces:
            current = choice
            on_change(choice)


def _nature(name: str, flags: frozenset[str], entry: Path, ports: Mapping[str, LinkKind]) -> dict[str, Any]:
    """Return the fields of an `Interface` that describe its kind. `entry` is its folder in /sys, if there is one."""
    if "loopback" in flags:
        return {"kind": LinkKind.LOOPBACK}
    tunnel = "pointopoint" in flags
    foreign = next((purpose for pattern, purpose in _FOREIGN if pattern.match(name)), "")
    about: dict[str, Any] = {"foreign": foreign, "no_arp": "noarp" in flags}
    if entry.is_dir():
        return {
            **about,
            "kind": _kind_in_sysfs(entry),
            "hardware": (entry / "device").exists(),
            "is_bridge": (entry / "bridge").is_dir(),
            "bridge": (entry / "master").resolve().name if (entry / "brport").is_dir() else "",
            "ports": tuple(sorted(path.name.removeprefix("lower_") for path in entry.glob("lower_*"))),
            "tunnel": tunnel or (entry / "tun_flags").exists() or "DEVTYPE=vxlan" in _text(entry / "uevent").split(),
        }
    # On macOS `bridge0` joins the Thunderbolt ports, and `bridge100` and up serve virtual machines.
    return {
        **about,
        "kind": ports.get(name, LinkKind.UNKNOWN),
        "hardware": name in ports,
        "is_bridge": name.startswith("bridge") and name not in ports,
        "tunnel": tunnel or name.startswith(_TUNNEL_NAMES),
    }


def _kind_in_sysfs(entry: Path) -> LinkKind:
    if (entry / "wireless").is_dir() or (entry / "phy80211").exists():
        return LinkKind.WIFI
    if (entry / "device" / "driver").resolve().name == "thunderbolt-net":
        return LinkKind.THUNDERBOLT
    return LinkKind.ETHERNET if _text(entry / "type") == str(_ARPHRD_ETHER) else LinkKind.UNKNOWN


def parse_hardware_ports(text: str) -> dict[str, LinkKind]:
    """Return the kind of each device in the output of `networksetup -listallhardwareports`."""
    found: dict[str, LinkKind] = {}
    for port, device in re.findall(r"^Hardware Port: (.*)\nDevice: (.+)$", text, re.MULTILINE):
        is_thunderbolt = "Thunderbolt" in port and "Ethernet" not in port
        wired = LinkKind.THUNDERBOLT if is_thunderbolt else LinkKind.ETHERNET
        found[device] = LinkKind.WIFI if port in ("Wi-Fi", "AirPort") else wired
    return found


@lru_cache(maxsize=1)
def _mac_ports() -> Mapping[str, LinkKind]:
    """Return the hardware ports. They are read once; a card that is plugged in later counts as unknown, and is used."""
    done = (
        run_tool("networksetup", "-listallhardwareports", timeout=_TOOL_TIMEOUT) if sys.platform == "darwin" else None
    )
    return {} if done is None else parse_hardware_ports(done.stdout)


def run_tool(*command: str, timeout: float) -> subprocess.CompletedProcess[str] | None:
    """Run a command. Return None if it is not installed or has not ended after `timeout` seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _prefix_length(netmask: str | None) -> int:
    """Return the prefix length of `255.255.255.0` or `ffff:ffff:ffff:ffff::`; the full length if there is no mask."""
    mask = parse_ip((netmask or "").partition("%")[0].partition("/")[0])
    return 128 if mask is None else int(mask).bit_count()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
