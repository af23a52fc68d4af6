"""Rules of the compressed all-reduce: the same bits at every rank, and nothing lost."""

from __future__ import annotations

import numpy as np

from ringfort.collectives.ops import ReduceOp
from ringfort.compression.compressor import GradientCompressor
from ringfort.context import DistributedContext
from ringfort.errors import NonFiniteError
from ringfort.testing.check import collective_check, raises
from ringfort.testing.reference import assert_same_everywhere

STRATEGIES = ("int8", "onebit", "topk(0.05)+int4", "randomk(0.1)", "powersgd(2)", "auto")
SHAPES = ((90, 40), (70_003,))


@collective_check(ranks=3)
def a_compressed_all_reduce_ends_with_the_same_bits_and_loses_nothing(context: DistributedContext) -> None:
    for name in STRATEGIES:
        compressor = GradientCompressor(name)
        for shape in SHAPES:
            given, got = np.zeros(shape), np.zeros(shape)
            for step in range(2):
                parts = [np.random.default_rng([rank, step]).normal(size=shape).astype(np.float32) for rank in range(3)]
                x = parts[context.rank]
                given += np.sum(parts, axis=0, dtype=np.float64)
                context.all_reduce(x, compression=compressor, name=str(shape))
                assert_same_everywhere(context.backend, x, f"{name} of {shape}")
                got += x
            residual = compressor.residual(str(shape))
            kept = np.zeros(shape) if residual is None else residual.reshape(shape).astype(np.float64)
            context.all_reduce(kept)
            assert np.allclose(got + kept, given, rtol=1e-4, atol=1e-3), f"{name} of {shape}"


@collective_check(ranks=3)
def a_nan_that_was_to_be_compressed_is_an_error_at_every_rank(context: DistributedContext) -> None:
    for name in ("int8", "topk(0.05)", "randomk(0.1)", "powersgd(2)"):
        x = np.ones((90, 40), np.float32)
        if context.rank == 2:
            x[1, 1] = np.nan
        with raises(NonFiniteError, saying="1 at rank 2"):
            context.all_reduce(x, ReduceOp.MEAN, compression=name)
    x = np.ones(5, np.float32)
    context.all_reduce(x)  # the group is still usable
    assert (x == 3).all()
