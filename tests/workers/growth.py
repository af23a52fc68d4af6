"""A node of `tests.workers.node` whose program goes on through many groups with one context.

{"do": "form", "n": n, "connections": ...}   establishes the ring until it has n ranks. Says {"formed": seconds, "rank":
r} {"do": "price", "size": bytes}   what AUTO makes of the links. Says {"mbit": ..., "strategy", "compression", "hosts"}
{"do": "clock", "size": bytes, "compression": name or null}   says {"ms": of the median all-reduce}
{"do": "battery", "largest": bytes, "step": s}   every kind of collective. Says {"right": seconds} or {"failed": text}

Every rank can make every rank's input, so each checks its own results; that all have the same bits is compared too.
"""

from __future__ import annotations

import time
from hashlib import sha256
from statistics import median
from typing import Any

import numpy as np

from ringfort.cluster.backend import AutoDiscoveryBackend
from ringfort.collectives import cost_model
from ringfort.compression.auto import choose
from ringfort.compression.compressor import GradientCompressor
from ringfort.compression.strategy import CompressionStrategy
from ringfort.config import AllReduceStrategy, CollectiveConfig, DistributedConfig, HealthConfig
from ringfort.context import DistributedContext
from ringfort.training.gradients import average_gradients
from tests.workers.node import Worker, main, say

SIZES = (8, 4096, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 28_000_000)
"""Bytes: those at which AUTO takes another way, and a bucket of gradients."""
CALL_TIMEOUT = 20.0


def given(size: int, rank: int, step: int) -> Any:
    """What a rank brings: whole numbers, whose sums are exact in any order."""
    return ((np.arange(size, dtype=np.int32) * 7 + 13 * rank + step) % 1000).astype(np.float32)


class Grower(Worker):
    context: DistributedContext | None = None
    compressor: GradientCompressor | None = None

    def start(self, **settings: Any) -> None:
        # Four hosts share two cores here: that one is held up for a second is no fault of the group.
        super().start(health=HealthConfig(patience=10.0), **settings)

    def form(self, n: int, timeout: float = 30.0, connections: Any = 1) -> None:
        if self.backend is None:
            collective = CollectiveConfig(connections=connections)
            config = DistributedConfig(timeout=CALL_TIMEOUT, collective=collective)
            self.backend = AutoDiscoveryBackend(node=self.node, group=config)
            self.context = DistributedContext(self.backend)
            self.compressor = GradientCompressor("int8")
        begun = time.monotonic()
        while True:
            left = max(0.01, begun + timeout - time.monotonic())
            self.backend.wait_for_peers(n - 1, left)
            self.backend.establish_ring(left)
            if self.backend.world_size == n:
                break
        say(formed=time.monotonic() - begun, rank=self.backend.rank)

    def price(self, size: int) -> None:
        group = self.backend.group
        model = cost_model.model_of(group)
        choice = choose(group, CompressionStrategy.AUTO, [(size // 4,)])
        say(
            mbit=8e-6 / float(model.links.per_byte.max()),
            strategy=str(model.choose(AllReduceStrategy, size)),
            compression=str(choice.strategy),
            hosts=group.hosts,
        )

    def clock(self, size: int, compression: str | None = None, rounds: int = 5) -> None:
        taken: list[float] = []
        x = np.random.default_rng(1).standard_normal(size // 4).astype(np.float32)
        for _ in range(rounds + 1):
            self.context.barrier()
            begun = time.perf_counter()
            self.context.all_reduce(x.copy(), compression=compression)
            taken.append(time.perf_counter() - begun)
        say(ms=1e3 * median(taken[1:]))

    def battery(self, largest: int, step: int) -> None:
        begun = time.monotonic()
        self.digest = sha256()
        for size in (size // 4 for size in SIZES if size <= largest):
            self._sums(self.context, size, step)
        self._gradients(step)
        self._compressed(step)
        self._sub_groups(step)
        self._at_once(step)
        self._gradients(step)  # once more, and first in the next group: what is agreed here must not hold there
        digests = self.context.all_gather_object(self.digest.hexdigest())
        assert len(set(digests)) == 1, "the ranks have different bits"
        say(right=time.monotonic() - begun)

    def _sums(self, ctx: DistributedContext, size: int, step: int) -> None:
        expected = sum(given(size, rank, step) for rank in range(ctx.world_size))
        for _ in range(2 if size < 1 << 20 else 1):  # the second goes the way that the first has kept ready
            x = ctx.all_reduce(given(size, ctx.rank, step))
            np.testing.assert_array_equal(x, expected)

    def _gradients(self, step: int) -> None:
        ctx = self.context
        tree = {"weight": given(300_000, ctx.rank, step), "bias": [given(1000, ctx.rank, step + 1)]}
        average_gradients(ctx, tree)
        for found, more in ((tree["weight"], 0), (tree["bias"][0], 1)):
            mean = sum(given(found.size, rank, step + more) for rank in range(ctx.world_size)) / ctx.world_size
            np.testing.assert_allclose(found, mean, rtol=1e-6)
            self.digest.update(found.tobytes())

    def _compressed(self, step: int) -> None:
        ctx, n = self.context, self.context.world_size
        size = 200_000
        exact = sum(given(size, rank, step) for rank in range(n))
        for compression, name in ((self.compressor, "tensor"), ("auto", None), ("int4", None)):
            x = ctx.all_reduce(given(size, ctx.rank, step), compression=compression, name=name)
            # What was not sent before comes with this one: no more than a step of the code for each rank.
            assert float(np.abs(x - exact).mean()) < 0.25 * 1000 * n, (
                str(compression),
                float(np.abs(x - exact).mean()),
            )
            self.digest.update(x.tobytes())
        for compression in ("auto", "int8", "powersgd(2)"):
            tree = {"weight": given(90_000, ctx.rank, step).reshape(300, 300), "bias": given(300, ctx.rank, step)}
            average_gradients(ctx, tree, compression=compression)
            self.digest.update(tree["weight"].tobytes() + tree["bias"].tobytes())

    def _sub_groups(self, step: int) -> None:
        ctx = self.context
        for members in ([*range(ctx.world_size)], [*range(ctx.world_size - 1)], [0]):
            sub = ctx.sub_group(members)
            if sub is not None:
                for size in (2, 100_000, 500_000):
                    self._sums(sub, size, step)

    def _at_once(self, step: int) -> None:
        ctx = self.context
        sizes = (2, 70_000, 1000, 300_000)
        arrays = [given(size, ctx.rank, step) for size in sizes]
        works = [ctx.all_reduce(array, async_op=True) for array in arrays]
        for size, work in zip(sizes, works, strict=True):
            np.testing.assert_array_equal(work.wait(), sum(given(size, rank, step) for rank in range(ctx.world_size)))


if __name__ == "__main__":
    main(Grower())
