"""Gloo and Open MPI pass every shipped check, with their own collectives for every size. (MPICH: tests/stress.)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ringfort import Backend, DistributedConfig, GlooBackend
from ringfort.bench.engines.mpi import OpenMpiShmEngine
from ringfort.testing import ALL_CHECKS, Check
from ringfort.testing.groups import closing_all
from ringfort.testing.ranks import results, run_ranks
from tests.helpers import mpi


@contextmanager
def gloo_group(world_size: int, config: DistributedConfig) -> Iterator[Sequence[Backend]]:
    store = pytest.importorskip("torch.distributed").HashStore()
    config = replace(config, collective=replace(config.collective, native_bytes=0))

    def connect(rank: int) -> GlooBackend:
        return GlooBackend(rank, world_size, store=store, config=config)

    with closing_all(results(run_ranks(range(world_size), connect))) as backends:
        yield backends


@pytest.mark.parametrize("check", ALL_CHECKS.values(), ids=ALL_CHECKS)
def test_over_gloo(check: Check) -> None:
    check.run(gloo_group)


@pytest.mark.parametrize("name", ALL_CHECKS)
def test_over_open_mpi(name: str) -> None:
    mpi.judge(OpenMpiShmEngine, name)
