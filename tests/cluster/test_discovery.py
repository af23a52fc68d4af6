"""Discovery between real hosts: network namespaces on switches, multicast as it is."""

from __future__ import annotations

import json
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.helpers.namespaces import Host, lan, needs_namespaces

pytestmark = needs_namespaces

PATIENCE = 20.0
"""Seconds for something that takes a tenth of one on an idle machine."""


class Listener:
    """A process of `tests.workers.discovery` and what it has printed."""

    def __init__(self, host: Host, network_id: str, port: int, *interfaces: str) -> None:
        self.host = host
        self.process = host.start(
            sys.executable, "-m", "tests.workers.discovery", network_id, str(port), *interfaces,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self.ports: dict[int, list[str]] = {}
        self.tokens: dict[str, int] = {}
        self.said: dict[str, Any] = {}
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(json.loads(line))
        self.lines.put({"ended": True})

    def wait(self, until: str, done: Any) -> float:
        """Take what comes until `done()`; returns the seconds that took."""
        start = time.monotonic()
        while not done():
            left = start + PATIENCE - time.monotonic()
            assert left > 0, f"{self.host.namespace} waited {PATIENCE} s {until}; it knows {self.ports}, {self.said}"
            try:
                self._take(self.lines.get(timeout=left))
            except queue.Empty:
                continue
        return time.monotonic() - start

    def settle(self) -> None:
        """Take what has come so far."""
        while not self.lines.empty():
            self._take(self.lines.get())

    def _take(self, line: dict[str, Any]) -> None:
        assert "ended" not in line, "the process ended"
        match line:
            case {"heard": heard}:
                self.ports[heard["port"]] = heard["addresses"]
                self.tokens[heard["token"]] = heard["port"]
            case {"gone": token}:
                self.ports.pop(self.tokens.pop(token), None)
            case _:
                self.said.update(line)

    def hears(self, *ports: int) -> float:
        return self.wait(f"to hear {ports}", lambda: set(self.ports) == set(ports))

    def end(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0
        self.reader.join(PATIENCE)


@contextmanager
def listeners(*wanted: tuple[Any, ...]) -> Iterator[list[Listener]]:
    started = [Listener(*arguments) for arguments in wanted]
    try:
        for listener in started:
            listener.wait("to start", lambda listener=listener: "started" in listener.said)
        yield started
        for listener in started:
            listener.end()
    finally:
        for listener in started:
            listener.process.kill()
            listener.reader.join(PATIENCE)


def new_network() -> str:
    return secrets.token_hex(16)


def test_four_hosts_hear_each_other_and_nobody_of_another_cluster() -> None:
    ours, theirs = new_network(), new_network()
    with lan(4) as net:
        wanted = [(host, ours, 1001 + host.number) for host in net.hosts]
        with listeners(*wanted, (net.hosts[0], theirs, 2001), (net.hosts[1], theirs, 2002)) as started:
            for number, listener in enumerate(started[:4]):
                listener.hears(*({1001, 1002, 1003, 1004} - {1001 + number}))
            started[4].hears(2002)
            started[5].hears(2001)
            for listener in started[:4]:
                for port, addresses in listener.ports.items():
                    assert addresses[0] == net.hosts[port - 1001].address()
                    assert all(address.endswith("%eth0") for address in addresses if address.startswith("fe80"))
                assert "trouble" not in listener.said


def test_a_peer_that_ends_says_goodbye() -> None:
    network = new_network()
    with lan(2) as net, listeners((net.hosts[0], network, 1001)) as (stays,):
        with listeners((net.hosts[1], network, 1002)):
            stays.hears(1002)
        stays.hears()


def test_docker_bridges_are_neither_used_nor_announced() -> None:
    network = new_network()
    with lan(2) as net:
        net.hosts[0].add_docker_bridge()
        with listeners((net.hosts[0], network, 1001), (net.hosts[1], network, 1002)) as (one, two):
            two.hears(1001)
            one.hears(1002)
            assert not [address for address in two.ports[1001] if address.startswith("172.")]
            assert not [address for address in one.said["started"] if "docker" in address or "veth" in address]


def test_an_interface_that_comes_later_is_announced_on_and_one_that_goes_is_not() -> None:
    network = new_network()
    with lan(2, switches=2) as net:
        net.unplug(net.hosts[0], 1)
        with listeners((net.hosts[0], network, 1001), (net.hosts[1], network, 1002)) as (_, two):
            two.hears(1001)
            assert net.hosts[0].address(1) not in two.ports[1001]
            net.plug(net.hosts[0], 1)
            two.wait("for the new address", lambda: net.hosts[0].address(1) in two.ports.get(1001, ()))
            net.unplug(net.hosts[0], 0)
            two.wait(
                "for the old address to go",
                lambda: 1001 in two.ports and net.hosts[0].address(0) not in two.ports[1001],
            )


def test_where_multicast_is_blocked_nobody_is_heard_but_oneself_on_the_same_host() -> None:
    network = new_network()
    with lan(2) as net:
        net.block_multicast()
        with listeners((net.hosts[0], network, 1001), (net.hosts[0], network, 1003), (net.hosts[1], network, 1002)) as (
            one,
            three,
            two,
        ):
            one.hears(1003)
            three.hears(1001)
            two.settle()
            assert two.ports == {}


def test_an_interface_without_multicast_is_a_trouble_with_the_fix() -> None:
    with lan(1) as net:
        net.hosts[0].set_link("multicast", "off")
        with listeners((net.hosts[0], new_network(), 1001)) as (one,):
            assert "carries no multicast" in one.said["trouble"]["what"]
            assert "multicast on" in one.said["trouble"]["fix"]


def test_processes_of_one_host_hear_each_other_on_loopback_alone() -> None:
    network = new_network()
    with (
        lan(1) as net,
        listeners((net.hosts[0], network, 1001, "lo"), (net.hosts[0], network, 1002, "lo")) as (
            one,
            two,
        ),
    ):
        one.hears(1002)
        two.hears(1001)
        assert one.ports[1002] == ["127.0.0.1", "::1"]


def test_a_program_that_keeps_the_mdns_port_is_a_trouble_with_the_fix() -> None:
    keep = (
        "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 5353)); "
        "print(flush=True); sys.stdin.read()"
    )
    with lan(1) as net:
        keeper = net.hosts[0].start(sys.executable, "-c", keep, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert keeper.stdout.readline() == b"\n"
        with listeners((net.hosts[0], new_network(), 1001)) as (one,):
            assert "port 5353" in one.said["trouble"]["what"]
            assert "avahi" in one.said["trouble"]["fix"]
            assert "--peer" in one.said["trouble"]["fix"]
