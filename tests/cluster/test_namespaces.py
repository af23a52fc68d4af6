"""The hosts that other tests are made on do what they say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.namespaces import Host, Lan, lan, needs_namespaces

pytestmark = needs_namespaces

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=0.3)"
"""A refused connection is an answer; where nothing passes there is none."""


@pytest.fixture
def net() -> Iterator[Lan]:
    with lan(2, switches=2) as made:
        yield made


def reaches(host: Host, other: Host, switch: int = 0) -> bool:
    process = host.start(sys.executable, "-c", CONNECT, other.address(switch), stderr=subprocess.PIPE, text=True)
    _, err = process.communicate(timeout=20)
    return "ConnectionRefusedError" in err


def test_hosts_reach_each_other_until_one_is_cut_off(net: Lan) -> None:
    one, two = net.hosts
    assert reaches(one, two)
    net.cut(two)
    assert not reaches(one, two)
    assert reaches(one, two, switch=1)
    net.heal(two)
    assert reaches(one, two)


def test_a_host_sees_that_its_cable_was_pulled(net: Lan) -> None:
    carrier = ("cat", "/sys/class/net/eth0/carrier")
    assert net.hosts[0].run(*carrier) == "1\n"
    net.unplug(net.hosts[0])
    assert net.hosts[0].run(*carrier) == "0\n"
    net.plug(net.hosts[0])
    assert net.hosts[0].run(*carrier) == "1\n"


def test_a_limit_holds_in_the_hosts_own_direction(net: Lan) -> None:
    net.limit(net.hosts[0], 50)
    assert "rate 50Mbit" in net.hosts[0].run("tc", "qdisc", "show", "dev", "eth0")
    net.unlimit(net.hosts[0])
    assert "tbf" not in net.hosts[0].run("tc", "qdisc", "show", "dev", "eth0")


def test_nothing_is_left_even_of_a_test_that_fails() -> None:
    with suppress(ZeroDivisionError), lan(1) as net:
        process = net.hosts[0].start("sleep", "60")
        _ = 1 / 0
    assert process.returncode is not None
    assert not Path("/run/netns", net.hosts[0].namespace).exists()
    assert not Path("/run/netns", net.switch).exists()
