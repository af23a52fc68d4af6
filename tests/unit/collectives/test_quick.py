"""All-reduces that are like one before them, over links: the second time goes another way and ends the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringfort import Backend, DistributedConfig, DistributedContext, ReduceOp
from ringfort.collectives.auto import BLOCK_BYTES, DOUBLING_BYTES, READY_BYTES
from ringfort.collectives.quick import _VIEWED, OverLinks
from ringfort.testing import run_ranks
from ringfort.testing.groups import tcp_group
from ringfort.testing.ranks import results


@pytest.mark.parametrize("encryption", ["on", "off"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.float16])
def test_the_second_time_goes_another_way_and_ends_the_same_at_every_rank(
    world_size: int, op: Any, dtype: Any, encryption: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if op is ReduceOp.MEAN and dtype is np.int32:
        op = ReduceOp.MIN
    short: list[int] = []
    through = OverLinks.__call__

    def spy(self: OverLinks, flat: Any) -> None:
        short.append(flat.nbytes)
        through(self, flat)

    monkeypatch.setattr(OverLinks, "__call__", spy)
    nbytes = (64, _VIEWED - 8, _VIEWED, _VIEWED + 8, DOUBLING_BYTES + 8, BLOCK_BYTES, BLOCK_BYTES + 8, READY_BYTES)
    sizes = [size // np.dtype(dtype).itemsize for size in nbytes]

    def program(backend: Backend) -> list[tuple[bytes, bytes]]:
        context = DistributedContext(backend)
        found: list[tuple[bytes, bytes]] = []
        for size in sizes:
            own = np.random.default_rng((size, context.rank)).normal(0, 100, size).astype(dtype)
            found.append((context.all_reduce(own.copy(), op).tobytes(), context.all_reduce(own.copy(), op).tobytes()))
        return found

    with tcp_group(world_size, DistributedConfig(timeout=20, shared_memory="off", encryption=encryption)) as backends:
        first, *others = results(run_ranks(backends, program))
    assert all(usual == quick for usual, quick in first)
    assert all(other == first for other in others)
    assert len(short) == world_size * len(sizes)
