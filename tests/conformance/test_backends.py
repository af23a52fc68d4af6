"""Every backend passes every shipped check: with a thread a rank, and the real ones with a process a rank too."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from ringfort import Backend, CollectiveConfig, DistributedConfig
from ringfort.collectives import channels, parallel
from ringfort.testing import (
    ALL_CHECKS,
    Check,
    CheckFailedError,
    GroupFactory,
    ProcessRanks,
    results,
    ring_group,
    run_ranks,
    simulated_group,
    sub_group_of,
    tcp_group,
)
from ringfort.testing.groups import closing_all, with_settings
from ringfort.transport import machine
from tests.helpers.documents import blocks


@cache
def documented() -> dict[str, Any]:
    """The backend that docs/backends.md shows to people who write one."""
    code = next(block.code for block in blocks() if "class PipeBackend" in block.code)
    assert len(code.splitlines()) <= 60
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@contextmanager
def pipe_group(world_size: int, config: DistributedConfig) -> Iterator[Sequence[Backend]]:
    with tempfile.TemporaryDirectory() as folder:
        made = run_ranks(range(world_size), lambda rank: documented()["PipeBackend"](rank, world_size, folder, config))
        with closing_all(results(made)) as backends:
            yield backends


@contextmanager
def unordered_group(world_size: int, config: DistributedConfig) -> Iterator[Sequence[Backend]]:
    """Shared memory as on processors whose writes others may see in another order."""
    with patch.object(machine, "_ORDERED", ()), tcp_group(world_size, config) as backends:
        yield backends


GROUPS: dict[str, GroupFactory] = {
    "simulated": simulated_group,
    "pipes, as in the documents": pipe_group,
    "tcp": with_settings(tcp_group, shared_memory="off"),
    "tcp without encryption": with_settings(tcp_group, shared_memory="off", encryption="off"),
    "ring with shared memory": ring_group,
    "shared memory as on ARM": unordered_group,
    "sub of tcp with shared memory": sub_group_of(tcp_group),
}

PROCESSES = {
    "tcp with shared memory": "ringfort.testing.processes:make_tcp",
    "ring without shared memory": "ringfort.testing.processes:make_ring_without_shared_memory",
}


@pytest.mark.parametrize("check", ALL_CHECKS.values(), ids=ALL_CHECKS)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_between_threads(group: GroupFactory, check: Check) -> None:
    check.run(group)


@pytest.mark.parametrize("name", [name for name in ALL_CHECKS if "all_reduce" in name or "killed" in name])
def test_over_connections(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every array cut. The rest of the checks, over real connections too, are in
    tests/stress/test_connections.py."""
    monkeypatch.setattr(parallel, "LEAST", 8)
    ALL_CHECKS[name].run(with_settings(simulated_group, collective=CollectiveConfig(connections=2)))


def use_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every array of 8 bytes and more that a ring reduces over two channels, on any machine."""
    monkeypatch.setattr(channels, "LEAST", 8)
    monkeypatch.setattr(channels, "LEAST_CHUNK", 16)
    monkeypatch.setattr(channels, "PER_CHANNEL", 8)
    monkeypatch.setattr(channels, "CORES", 0)
    monkeypatch.setattr(channels, "wanted", lambda table, asked: 2)


@pytest.mark.parametrize("name", [name for name in ALL_CHECKS if "all_reduce" in name or "killed" in name])
def test_over_channels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the checks, and other groups, are in tests/stress/test_connections.py."""
    use_channels(monkeypatch)
    ALL_CHECKS[name].run(GROUPS["tcp"])


@cache
def failures_between_processes(make: str) -> dict[str, CheckFailedError]:
    """All checks in one set of processes: starting them takes longer than running most checks."""
    failures: dict[str, CheckFailedError] = {}
    with ProcessRanks(max(check.ranks for check in ALL_CHECKS.values()), make) as ranks:
        for check in ALL_CHECKS.values():
            try:
                ranks.run(check)
            except CheckFailedError as exc:
                failures[check.name] = exc
    return failures


@pytest.mark.parametrize("name", ALL_CHECKS)
@pytest.mark.parametrize("make", PROCESSES.values(), ids=PROCESSES)
def test_between_processes(make: str, name: str) -> None:
    failure = failures_between_processes(make).get(name)
    if failure is not None:
        raise failure
