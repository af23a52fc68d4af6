"""MPICH passes every shipped check too. It is the other MPI that people have; one of them in every run is enough."""

from __future__ import annotations

import pytest

from ringfort.bench.engines.mpi import MpichShmEngine
from ringfort.testing import ALL_CHECKS
from tests.helpers import mpi


@pytest.mark.parametrize("name", ALL_CHECKS)
def test_over_mpich(name: str) -> None:
    mpi.judge(MpichShmEngine, name)
