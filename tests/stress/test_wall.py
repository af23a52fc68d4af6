"""The long and timed forms of tests/cluster/test_wall.py, and every bit of a handshake."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pytest

from ringfort.config import parse_address
from ringfort.identity.namespace import NetworkNamespace
from ringfort.launch.local_ranks import LocalRanks
from ringfort.testing.groups import reserved_addresses
from tests.cluster.test_wall import group_through, join_through
from tests.helpers.handshakes import member
from tests.helpers.middle import SlowMiddle
from tests.unit.transport.test_handshake import check_flip, overheard
from tests.workers.strangers import Count, crowd

ROOT = str(Path(__file__).parents[2])
ROUNDS = 7
"""Quiet and crowded runs in turn: the machine may be busy for a while, and then it is for both."""


def test_four_ranks_meet_and_reduce_in_a_crowd_at_more_than_70_percent_of_the_quiet_speed() -> None:
    cluster = NetworkNamespace.generate()
    quiet, crowded, total, seconds = [], [], Count(0, 0), 0.0
    with reserved_addresses(1) as (master,):
        for _ in range(ROUNDS):
            quiet.append(speed(master, cluster))
            with crowd(master, cluster) as count:
                start = time.monotonic()
                crowded.append(speed(master, cluster))
                seconds += time.monotonic() - start
                now = count()
                total = Count(total.attempts + now.attempts, total.connected + now.connected)
    ratio = median(crowded) / median(quiet)
    print(
        f"{total.attempts / seconds:.0f} bad connections a second, {total.connected} met an open listener; "
        f"all-reduce {median(quiet):.2f} GB/s quiet, {median(crowded):.2f} GB/s crowded: {ratio:.0%}"
    )
    assert total.attempts > 200 * seconds
    assert ratio > 0.7


def speed(master: str, cluster: NetworkNamespace) -> float:
    """GB/s of all-reduces of four ranks, in processes, that first meet at `master`. The slowest rank's."""
    host, port = parse_address(master)
    variables = {
        "PYTHONPATH": ROOT,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "RINGFORT_LISTEN_FD": "",
        "RINGFORT_KEY": cluster.join_code(),
    }
    with LocalRanks("tests.workers.ranks", 4, ["speed"], variables=variables) as ranks:
        return min(message["gigabytes_per_second"] for _, message in ranks.messages())


def test_groups_form_for_a_minute_through_a_crowd() -> None:
    cluster = NetworkNamespace.generate()
    groups = 0
    with reserved_addresses(1) as (master,), crowd(master, cluster) as count:
        start = time.monotonic()
        while time.monotonic() - start < 60:
            join_through(master, cluster, count)
            groups += 1
        print(f"{groups} groups, {count()}")


@pytest.mark.parametrize("direction", [0, 1])
def test_every_flipped_bit_of_an_handshake_opens_nothing(direction: int) -> None:
    for place in range(len(overheard()[direction])):
        for bit in range(8):
            check_flip(direction, place, 1 << bit)


@pytest.mark.parametrize("delay", [0.03, 0.1])
def test_a_rank_behind_a_slow_way_gets_in_through_1500_silent_connections_a_second(delay: float) -> None:
    cluster = NetworkNamespace.generate()
    taken: list[float] = []
    with reserved_addresses(1) as (master,), crowd(master, cluster, 1500, is_silent=True) as count:
        begun = time.monotonic()
        for _ in range(20):
            start = time.monotonic()
            with (
                SlowMiddle(master, lambda: time.sleep(delay)) as middle,
                group_through(middle, master, [member(cluster), member(cluster)]),
            ):
                taken.append(time.monotonic() - start)
        rate = count().attempts / (time.monotonic() - begun)
    print(f"{rate:.0f} a second, {delay * 1e3:.0f} ms: in after {median(taken):.2f} s, at most {max(taken):.2f} s")
    assert max(taken) < 2
