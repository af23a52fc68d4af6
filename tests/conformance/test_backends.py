"""Every backend passes every shipped check: with a thread a rank, and the real ones with a process a rank too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from ringfort import Backend, DistributedConfig, SimulatedBackend
from ringfort.backends.base import Tag
from ringfort.collectives import parallel
from ringfort.testing import (
    ALL_CHECKS,
    Check,
    CheckFailedError,
    GroupFactory,
    ProcessRanks,
    ring_group,
    simulated_group,
    sub_group_of,
    tcp_group,
)
from ringfort.testing.groups import closing_all, with_connections, without_encryption, without_shared_memory
from ringfort.transport import machine
from ringfort.transport.reducer import Reducer

if TYPE_CHECKING:
    from typing_extensions import Buffer


class PlainBackend(Backend):
    """The least that a backend can be: everything but the abstract methods is inherited."""

    def __init__(self, inner: SimulatedBackend) -> None:
        super().__init__(inner.rank, inner.world_size, inner.config)
        self._inner = inner

    def send(self, data: Buffer, dst: int, *, tag: Tag = 0, timeout: float | None = None) -> None:
        self._inner.send(data, dst, tag=tag, timeout=timeout)

    def recv(
        self, into: Buffer, src: int, *, reduce: Reducer | None = None, tag: Tag = 0, timeout: float | None = None
    ) -> None:
        self._inner.recv(into, src, reduce=reduce, tag=tag, timeout=timeout)

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()

    def kill(self) -> None:
        self._inner.kill()


@contextmanager
def plain_group(world_size: int, config: DistributedConfig) -> Iterator[Sequence[Backend]]:
    inner = SimulatedBackend.create_group(world_size, config=config)
    with closing_all([PlainBackend(backend) for backend in inner]) as backends:
        yield backends


@contextmanager
def unordered_group(world_size: int, config: DistributedConfig) -> Iterator[Sequence[Backend]]:
    """Shared memory as on processors whose writes others may see in another order."""
    with patch.object(machine, "_ORDERED", ()), tcp_group(world_size, config) as backends:
        yield backends


GROUPS: dict[str, GroupFactory] = {
    "simulated": simulated_group,
    "plain": plain_group,
    "tcp": without_shared_memory(tcp_group),
    "tcp without encryption": without_shared_memory(without_encryption(tcp_group)),
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
    """With every array cut. The rest of the checks, over real connections too, are in tests/stress/test_stripes.py."""
    monkeypatch.setattr(parallel, "LEAST", 8)
    ALL_CHECKS[name].run(with_connections(simulated_group))


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
