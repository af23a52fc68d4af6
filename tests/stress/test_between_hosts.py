"""Large all-reduces of two hosts with two ranks each, in network namespaces: channels between the hosts, shared memory
inside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ringfort.config import MIB
from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.namespaces import lan, needs_namespaces

NBYTES = 16 * MIB
"""Less than `auto` compares in: so channels are used in every call."""
TIMES = 12
ALONE = 1
"""Rank on the first host that is killed."""


@needs_namespaces
def test_channels_join_hosts_and_a_killed_rank_is_named_by_all(tmp_path: Path) -> None:
    key = NetworkNamespace.generate().join_code()
    with lan(2) as net:
        for host in net.hosts:
            net.limit(host, 10_000)
        ranks: list[subprocess.Popen[str]] = []
        for rank in range(4):
            host = net.hosts[rank // 2]
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": "4",
                "MASTER_ADDR": net.hosts[0].address(),
                "MASTER_PORT": "29500",
                "RINGFORT_KEY": key,
                "RINGFORT_HOME": str(tmp_path / host.namespace),
            }
            command = [sys.executable, "-m", "tests.workers.ranks", "between_hosts", str(NBYTES), str(TIMES)]
            ranks.append(host.start(*command, variables=variables, stdout=subprocess.PIPE, text=True))
        found = [said_by(process) for process in ranks]
        os.kill(ranks[ALONE].pid, signal.SIGKILL)
        killed = time.monotonic()
        ends = [said_by(process) for rank, process in enumerate(ranks) if rank != ALONE]
    print(f"{found[0]['seconds'] / TIMES * 1e3:.0f} ms each over {found[0]['used']} connections")
    for rank, one in enumerate(found):
        assert one["hosts"] == [0, 0, 2, 2]
        assert one["total"] == 10
        assert one["used"] == 2
        assert one["peers"] == [(rank + 2) % 4], "each rank of a host has channels to one on the other host"
        assert one["threads"] == found[0]["threads"] > 0
        assert one["loopback"] < NBYTES // 10, "between ranks of a host nothing but wake-ups goes through the kernel"
    for end in ends:
        assert (end["error"], end["peer"]) == ("PeerLostError", ALONE)
        assert end["at"] - killed < 1


def said_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that a rank prints."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())
