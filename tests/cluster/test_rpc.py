"""Calls between real processes, of which one is killed."""

from __future__ import annotations

import json
import subprocess
import sys

from ringfort.config import MIB
from tests.helpers.namespaces import lan, needs_namespaces
from tests.helpers.storms import ROOT, storm


def test_every_call_ends_once_and_nothing_is_left_behind() -> None:
    assert storm(300, MIB, 1, kill_after=None) == 1200


def test_every_call_ends_once_when_a_rank_is_killed() -> None:
    assert storm(600, MIB, 2, kill_after=0.2) == 1800


@needs_namespaces
def test_agents_on_several_hosts_take_the_way_of_their_group() -> None:
    with lan(3) as net:
        master = {"WORLD_SIZE": "3", "MASTER_ADDR": net.hosts[0].address(), "MASTER_PORT": "29500"}
        ranks = [
            host.start(
                *(sys.executable, "-m", "tests.workers.rpc", "90", "65536", "3"),
                variables={**master, "RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(net.hosts)
        ]
        for rank in ranks:
            _, ended, rest = map(json.loads, rank.communicate(timeout=90)[0].splitlines())
            assert (ended["outcomes"], ended["left"]) == ({"right": 90}, [0] * 6)
            assert (rest["threads"], rest["sockets"]) == (["MainThread"], 0)
