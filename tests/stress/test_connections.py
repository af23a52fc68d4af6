"""Several connections between every two ranks: every shipped check with every array cut; kills and memory."""

from __future__ import annotations

from typing import Any

import pytest

from ringfort.collectives import parallel
from ringfort.config import MIB, CollectiveConfig
from ringfort.testing import ALL_CHECKS, Check, GroupFactory, ring_group, simulated_group, sub_group_of, tcp_group
from ringfort.testing.groups import with_settings
from tests.cluster.test_processes import kill_one, memory_of
from tests.conformance.test_backends import use_channels

GROUPS: dict[str, GroupFactory] = {
    "simulated": simulated_group,
    "tcp": with_settings(tcp_group, shared_memory="off"),
    "tcp without encryption": with_settings(tcp_group, shared_memory="off", encryption="off"),
    "ring": with_settings(ring_group, shared_memory="off"),
    "sub of tcp": sub_group_of(with_settings(tcp_group, shared_memory="off")),
}


@pytest.mark.parametrize("check", ALL_CHECKS.values(), ids=ALL_CHECKS)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_every_check_holds_over_connections(group: GroupFactory, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "LEAST", 8)
    check.run(with_settings(group, collective=CollectiveConfig(connections=3)))


@pytest.mark.parametrize("check", ALL_CHECKS.values(), ids=ALL_CHECKS)
@pytest.mark.parametrize("group", ["tcp", "tcp without encryption", "ring", "sub of tcp"])
def test_every_check_holds_over_channels(group: str, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    use_channels(monkeypatch)
    check.run(GROUPS[group])


@pytest.mark.parametrize("check", ALL_CHECKS.values(), ids=ALL_CHECKS)
@pytest.mark.parametrize("group", ["tcp", "sub of tcp"])
def test_every_check_holds_over_channels_between_hosts(
    group: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on each host, and the last one alone if their number is odd."""
    use_channels(monkeypatch)
    monkeypatch.setattr(
        "ringfort.backends.group.hosts_of", lambda machines: tuple(rank // 2 * 2 for rank in range(len(machines)))
    )
    check.run(GROUPS[group])


@pytest.mark.parametrize("connections", [1, 3, "auto"])
def test_killed_ranks_are_each_named_within_a_second(connections: Any) -> None:
    seconds = sorted(kill_one(turn % 4, 64 * MIB, shared_memory="off", connections=connections) for turn in range(12))
    print(f"median {seconds[6]:.3f} s, worst {seconds[-1]:.3f} s")
    assert seconds[-1] < 1


@pytest.mark.parametrize("connections", [4, "auto"])
def test_connections_take_little_memory_beside_the_array(connections: Any) -> None:
    grown = memory_of(2, 1024 * MIB, shared_memory="off", connections=connections)
    print(f"{grown / MIB:.1f} MiB")
    assert grown < 32 * MIB
