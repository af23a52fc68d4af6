"""Two hosts on one machine: network namespaces joined by a wire that carries so many bits a second each way."""

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
INTERFACE = "wire0"


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
def two_hosts() -> Generator[list[Host], None, None]:
    """The hosts; they and the wire go when it is left."""
    names = [f"ringfort-bench-{os.getpid()}-{number}" for number in range(2)]
    addresses = ["10.213.77.1", "10.213.77.2"]
    with ExitStack() as stack:
        for name in names:
            _do("ip", "netns", "add", name)
            stack.callback(_do, "ip", "netns", "delete", name)
        ends = [("name", INTERFACE, "netns", name) for name in names]
        _do("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, address in zip(names, addresses, strict=True):
            _do("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _do("ip", "-n", name, "link", "set", interface, "up")
            limit = ("rate", f"{RATE}bit", "burst", str(BURST), "latency", f"{QUEUE_SECONDS * 1000:g}ms")
            _do("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)
        yield [
            Host(("ip", "netns", "exec", name), address, INTERFACE)
            for name, address in zip(names, addresses, strict=True)
        ]


def _do(*command: str) -> None:
    subprocess.run(command, check=True, timeout=10)
