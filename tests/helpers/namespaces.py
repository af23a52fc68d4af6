"""Hosts for tests, made of network namespaces: any number of them, on any number of switches.

    with lan(4) as net:
        process = net.hosts[0].start(sys.executable, "-m", "tests.something")
        net.cut(net.hosts[0])

A switch is a bridge in a namespace of its own, so the network of the machine that runs the tests is never touched. Each
host has `eth0` on the first switch, `eth1` on the second, and so on: switch s gives host h the address 10.77.s.(h+1).
With `addresses="ipv6"` that is fd77:0:0:s::(h+1) instead, and with "link-local" fe80::77:s:(h+1).
Making needs root; `needs_namespaces` skips a test with the reason where it cannot be had.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PREFIX = "rf"
"""Names are rf<process>x<number>...: two test runs never meet, and what a killed run left is known by its process."""
KILL_GRACE = 5.0
"""Seconds that a killed process has to be gone; the kernel needs milliseconds."""
NO_WAIT_FOR_IPV6 = "for f in all default; do echo 0 > /proc/sys/net/ipv6/conf/$f/accept_dad; done 2> /dev/null; true"
"""An IPv6 address is usable at once, not after a second of asking whether somebody else has it."""

ETC = Path("/etc/netns")
"""`ip netns exec` shows a host what is in its folder here in place of the machine's own /etc."""

_numbers = count()


@functools.cache
def why_not() -> str:
    """Why this machine can make no hosts; empty where it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "tc", "bridge") if shutil.which(tool) is None]
    if missing:
        return f"the tools {', '.join(missing)} are missing (package iproute2)"
    name = f"{PREFIX}{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    _tool("ip", "netns", "delete", name)
    return ""


@dataclass
class Host:
    """One host. What is started on it ends with the network."""

    number: int
    namespace: str
    switch: str
    """The namespace of the switches."""
    addresses: Literal["ipv4", "ipv6", "link-local"] = "ipv4"
    running: list[subprocess.Popen[Any]] = field(default_factory=list)

    def address(self, switch: int = 0) -> str:
        """Its address on a switch, without a scope."""
        if self.addresses == "ipv4":
            return f"10.77.{switch}.{self.number + 1}"
        if self.addresses == "ipv6":
            return f"fd77:0:0:{switch}::{self.number + 1}"
        return f"fe80::77:{switch}:{self.number + 1}"

    def command(self, *arguments: str) -> list[str]:
        """The command that runs `arguments` on this host; it sees this host's interfaces in /sys too."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def start(
        self, *arguments: str, variables: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process here. `ip netns exec` becomes the program, so its process id is the program's own."""
        paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        environment = {**os.environ, "PYTHONPATH": paths, **(variables or {})}
        process = subprocess.Popen(self.command(*arguments), env=environment, **options)
        self.running.append(process)
        return process

    def run(self, *arguments: str, timeout: float = 30.0, variables: Mapping[str, str] | None = None) -> str:
        """Run to the end and return what it printed. Fails the test with its errors if it fails."""
        process = self.start(*arguments, variables=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == 0, f"{' '.join(arguments)} on {self.namespace}: {err}\n{out}"
        return out

    def set_link(self, *settings: str, interface: str = "eth0") -> None:
        """`ip link set INTERFACE SETTINGS` on this host, such as `down`, or `multicast off`."""
        _tool("ip", "-netns", self.namespace, "link", "set", "dev", interface, *settings)

    def add_docker_bridge(self, name: str = "docker0", address: str = "172.17.0.1/16") -> None:
        """A bridge as docker makes it, with a veth in it that leads to another namespace: the container's."""
        _batch(
            self.namespace,
            f"link add {name} type bridge",
            f"link add vethc0 type veth peer name h{self.number}{name} netns {self.switch}",
            f"link set vethc0 master {name}",
            f"address add {address} dev {name}",
            *(f"link set {device} up" for device in (name, "vethc0")),
        )
        _batch(self.switch, f"link set h{self.number}{name} up")

    def end(self) -> None:
        """Kill what runs here and wait for it."""
        for process in self.running:
            if process.poll() is None:
                process.kill()
        for process in self.running:
            process.wait(KILL_GRACE)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self.running.clear()


@dataclass
class Lan:
    """Some hosts and the switches between them."""

    switch: str
    """The namespace of the switches: bridges sw0, sw1, ..., with ports h<host>s<switch>."""
    hosts: Sequence[Host]
    switches: int

    def cut(self, host: Host, switch: int = 0) -> None:
        """Nothing passes between `host` and the switch, and neither side is told: a fault inside the network."""
        self._port(host, switch, "state", "0")

    def heal(self, host: Host, switch: int = 0) -> None:
        """Undo `cut`."""
        self._port(host, switch, "state", "3")

    def split(self, hosts: Sequence[Host], switch: int = 0) -> None:
        """`hosts` reach each other and nobody else: the switch falls apart into two, and no host is told."""
        apart = f"apart{switch}"
        if subprocess.run(
            ["ip", "-netns", self.switch, "link", "show", apart], capture_output=True, check=False
        ).returncode:
            _batch(
                self.switch, f"link add {apart} type bridge mcast_snooping 0 forward_delay 0", f"link set {apart} up"
            )
        _batch(self.switch, *(f"link set {_port(host, switch)} master {apart}" for host in hosts))

    def unite(self, switch: int = 0) -> None:
        """Undo `split`."""
        _batch(self.switch, *(f"link set {_port(host, switch)} master sw{switch}" for host in self.hosts))

    def reset(self, host: Host) -> None:
        """Reset every TCP connection of `host`, as a firewall on the path may do: both ends are told at once. New ones
        may be made. Needs a kernel that can (CONFIG_INET_DIAG_DESTROY); `needs_resets` skips a test where it cannot."""
        host.run("ss", "-K", "-t", "state", "established")

    def unplug(self, host: Host, switch: int = 0) -> None:
        """Pull the cable: the host sees that its interface has no carrier."""
        _batch(self.switch, f"link set {_port(host, switch)} down")

    def plug(self, host: Host, switch: int = 0) -> None:
        """Undo `unplug`."""
        _batch(self.switch, f"link set {_port(host, switch)} up")
        self._port(host, switch, "state", "3")

    def block_multicast(self, switch: int = 0) -> None:
        """From now on the switch forwards no multicast, as many Wi-Fi access points do. (IPv6 needs it to find
        neighbours, so only IPv4 is left.)"""
        for host in self.hosts:
            self._port(host, switch, "mcast_flood", "off")

    def limit(self, host: Host, megabits: float, switch: int = 0, *, burst_seconds: float = 0.010) -> None:
        """Let at most so many megabits a second through, each way, between `host` and the switch. What would pass in
        `burst_seconds` passes at once after a pause."""
        for namespace, device in ((host.namespace, f"eth{switch}"), (self.switch, _port(host, switch))):
            # The bucket holds what passes in 10 ms by default, and the queue 50 ms: about what a cheap switch has.
            burst = max(int(megabits * 1e6 / 8 * burst_seconds), 16 * 1024)
            _tool(
                "tc", "-netns", namespace, "qdisc", "replace", "dev", device, "root", "tbf",
                "rate", f"{megabits}mbit", "burst", str(burst), "latency", "50ms",
            )  # fmt: skip

    def unlimit(self, host: Host, switch: int = 0) -> None:
        """Undo `limit`."""
        for namespace, device in ((host.namespace, f"eth{switch}"), (self.switch, _port(host, switch))):
            _tool("tc", "-netns", namespace, "qdisc", "delete", "dev", device, "root")

    def _port(self, host: Host, switch: int, *settings: str) -> None:
        _tool("bridge", "-netns", self.switch, "link", "set", "dev", _port(host, switch), *settings)


@contextmanager
def lan(
    hosts: int,
    *,
    switches: int = 1,
    machine_ids: bool = False,
    addresses: Literal["ipv4", "ipv6", "link-local"] = "ipv4",
) -> Iterator[Lan]:
    """`hosts` hosts, each connected to each of `switches` switches. With `machine_ids`, each has its own, as machines
    have. Everything is gone afterwards, processes first."""
    _sweep()
    name = f"{PREFIX}{os.getpid()}x{next(_numbers)}"
    made = [Host(number, f"{name}h{number}", f"{name}sw", addresses) for number in range(hosts)]
    net = Lan(f"{name}sw", made, switches)
    namespaces = (net.switch, *(host.namespace for host in net.hosts))
    try:
        for namespace in namespaces:
            _tool("ip", "netns", "add", namespace)
            _tool("ip", "netns", "exec", namespace, "sh", "-c", NO_WAIT_FOR_IPV6)
        _wire(net)
        for host in net.hosts if machine_ids else ():
            (ETC / host.namespace).mkdir(parents=True)
            (ETC / host.namespace / "machine-id").write_text(f"{host.namespace}\n")
        yield net
    finally:
        for host in net.hosts:
            host.end()
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
            shutil.rmtree(ETC / namespace, ignore_errors=True)


def _wire(net: Lan) -> None:
    _batch(
        net.switch,
        # No snooping: it would hold multicast back until a querier came, which small switches do not do either.
        *(f"link add sw{switch} type bridge mcast_snooping 0 forward_delay 0" for switch in range(net.switches)),
        *(f"link set sw{switch} up" for switch in range(net.switches)),
    )
    for host in net.hosts:
        _batch(host.namespace, "link set lo up")
        for switch in range(net.switches):
            port = _port(host, switch)
            _batch(
                net.switch,
                f"link add {port} type veth peer name eth{switch} netns {host.namespace}",
                f"link set {port} master sw{switch}",
                f"link set {port} up",
            )
            _batch(
                host.namespace,
                f"address add {host.address(switch)}/{24 if host.addresses == 'ipv4' else 64} dev eth{switch}",
                f"link set eth{switch} up",
            )


def _port(host: Host, switch: int) -> str:
    return f"h{host.number}s{switch}"


def _batch(namespace: str, *lines: str) -> None:
    _tool("ip", "-netns", namespace, "-batch", "-", given="\n".join(lines) + "\n")


def _tool(*arguments: str, given: str | None = None) -> None:
    done = subprocess.run(arguments, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(arguments)}: {done.stderr.strip()} {given or ''}")


def _sweep() -> None:
    """Remove what test runs that were killed have left."""
    names = Path("/run/netns")
    for entry in names.iterdir() if names.is_dir() else ():
        found = re.match(rf"{PREFIX}(\d+)(x|try)", entry.name)
        if found and not psutil.pid_exists(int(found[1])):
            subprocess.run(["ip", "netns", "delete", entry.name], capture_output=True, check=False)


@functools.cache
def why_no_resets() -> str:
    """Why this machine can reset no connections; empty where it can."""
    if why_not() or shutil.which("ss") is None:
        return why_not() or "the tool ss is missing (package iproute2)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as one, server.accept()[0] as two:
            subprocess.run(["ss", "-K", "-t", f"dport = :{port}"], capture_output=True, check=False)
            for end in (one, two):
                end.settimeout(0.5)
                try:
                    end.recv(1)
                except ConnectionError:
                    return ""
                except OSError:
                    pass
    return "this kernel resets no connections (CONFIG_INET_DIAG_DESTROY)"


needs_resets = pytest.mark.skipif(bool(why_no_resets()), reason=why_no_resets() or "never skipped")
needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "never skipped")
