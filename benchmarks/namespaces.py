"""Hosts on one machine: network namespaces joined by wires that carry so many bits a second each way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from ringfort.bench.engines.base import Host

RATE = 1_000_000_000
"""Bits a second, each way."""
BURST = 512 * 1024
"""Bytes that may leave at once after a pause; the page takes them off. With less, the shaper's timer and not the ranks
set the pace: with 64 KiB even bare sockets filled no more than 0.6 of the rate."""
QUEUE_SECONDS = 0.05
"""How long a packet may wait for its turn before it is dropped, as at the port of a switch."""
CONGESTION = "cubic"
"""How TCP finds its speed there: Linux's own way, whatever this machine is set to. With BBR even bare sockets filled
anything from 0.6 to 0.97 of the rate on a shared machine; with cubic 0.98 to 0.99, run after run. It is said by the
route because a namespace may not choose for itself."""
INTERFACE = "wire0"
FLOW_RATE = 200_000_000
"""Bits a second that one connection gets, each way, where connections are held back."""
FLOW_PORTS = range(41_000, 41_032)
"""Ports that a host of such a network connects from: one class of the shaper for each, which so is one connection's."""
CABLE_RATE = 400_000_000
"""Bits a second of each cable between three hosts, each way."""


def why_not() -> str | None:
    """Why hosts cannot be made here, in words; None if they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root: run `sudo make bench`"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed: it is part of iproute2"
    return None


@contextmanager
def two_hosts(rate: int = RATE, burst: int = BURST) -> Generator[list[Host], None, None]:
    """The hosts; they and the wire go when it is left."""
    with _hosts(2) as hosts:
        _join(*hosts)
        for host in hosts:
            _limit(host, INTERFACE, rate, burst)
        yield hosts


@contextmanager
def held_back_hosts() -> Generator[list[Host], None, None]:
    """Two hosts whose wire gives every connection `FLOW_RATE` and no more, as some clouds and providers do."""
    with _hosts(2) as hosts:
        _join(*hosts)
        for host, port in zip(hosts, ("dport", "sport"), strict=True):  # the second host connects to the first
            low, high = FLOW_PORTS[0], FLOW_PORTS[-1]
            _do(*host.prefix, "sysctl", "-q", "-w", f"net.ipv4.ip_local_port_range={low} {high}")
            to = f"dev {INTERFACE} parent 1:"
            lines = [f"qdisc add dev {INTERFACE} root handle 1: htb"]
            for number, of in enumerate(FLOW_PORTS, start=1):
                lines.append(f"class add {to} classid 1:{number} htb rate {FLOW_RATE}bit burst 64k quantum 15140")
                lines.append(f"filter add {to} protocol ip prio 1 u32 match ip {port} {of} 0xffff flowid 1:{number}")
            _do(*host.prefix, "tc", "-batch", "-", given="\n".join(lines) + "\n")
        yield hosts


@contextmanager
def cabled_hosts() -> Generator[list[Host], None, None]:
    """Three hosts without a switch, each joined to each of the others by a cable of `CABLE_RATE`."""
    with _hosts(3) as hosts:
        for host in hosts:
            _in(host, "address", "add", f"{host.address}/32", "dev", "lo")
        for a, b in ((0, 1), (1, 2), (0, 2)):
            pair = hosts[a], hosts[b]
            _join(*pair, interface=f"cable{a}{b}")
            for host, other in (pair, pair[::-1]):
                way = ("via", f"10.213.{78 + a + b}.{1 + hosts.index(other)}", "src", host.address)
                _in(host, "route", "add", f"{other.address}/32", *way, "congctl", CONGESTION)
                _limit(host, f"cable{a}{b}", CABLE_RATE)
        yield hosts


@contextmanager
def _hosts(count: int) -> Generator[list[Host], None, None]:
    names = [f"ringfort-bench-{os.getpid()}-{number}" for number in range(count)]
    with ExitStack() as stack:
        for name in names:
            _do("ip", "netns", "add", name)
            stack.callback(_do, "ip", "netns", "delete", name)
            _do("ip", "-n", name, "link", "set", "lo", "up")
        yield [
            Host(("ip", "netns", "exec", name), f"10.213.77.{number}", INTERFACE)
            for number, name in enumerate(names, start=1)
        ]


def _join(one: Host, other: Host, interface: str = INTERFACE) -> None:
    """A wire between two hosts. One that is not the only one has addresses of its own."""
    ends = [("name", interface, "netns", host.prefix[-1]) for host in (one, other)]
    _do("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for host in (one, other):
        number = int(host.address.rpartition(".")[2])
        third = 77 if interface == INTERFACE else 78 + sum(map(int, interface[-2:]))
        address = f"10.213.{third}.{number}"
        _in(host, "address", "add", f"{address}/24", "dev", interface)
        _in(host, "link", "set", interface, "up")
        net = (f"10.213.{third}.0/24", "dev", interface, "src", address)
        _in(host, "route", "replace", *net, "congctl", CONGESTION)


def _limit(host: Host, interface: str, rate: int, burst: int = BURST) -> None:
    limit = ("rate", f"{rate}bit", "burst", str(burst), "latency", f"{QUEUE_SECONDS * 1000:g}ms")
    _do("tc", "-n", host.prefix[-1], "qdisc", "add", "dev", interface, "root", "tbf", *limit)


def _in(host: Host, *words: str) -> None:
    _do("ip", "-n", host.prefix[-1], *words)


def _do(*command: str, given: str | None = None) -> None:
    subprocess.run(command, check=True, timeout=10, input=given, text=True)
