"""The long and timed forms of tests/cluster/test_processes.py."""

from __future__ import annotations

from ringfort.config import GIB, MIB
from tests.cluster.test_processes import connect_time, kill_one, memory_of


def test_a_hundred_killed_ranks_are_each_named_within_a_second() -> None:
    seconds = sorted(kill_one(turn % 4, 256 * MIB) for turn in range(100))
    print(f"median {seconds[50]:.3f} s, worst {seconds[-1]:.3f} s")
    assert seconds[-1] < 1


def test_a_gibibyte_takes_less_than_16_mib_beside_the_array() -> None:
    grown = memory_of(2, GIB)
    print(f"{grown / MIB:.1f} MiB")
    assert grown < 16 * MIB


def test_eight_ranks_connect_within_a_second_of_the_last() -> None:
    seconds = sorted(connect_time(8) for _ in range(10))
    print(f"median {seconds[5]:.3f} s, worst {seconds[-1]:.3f} s")
    assert seconds[-1] < 1
