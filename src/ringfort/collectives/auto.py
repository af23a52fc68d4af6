"""Which way the data should take: a cost model fed with latency and bandwidth, and the choice it makes.

Every rank must choose the same from the same arguments, so the model is plain arithmetic: no clocks, no logarithms of
the platform's, and ties go to the earlier candidate.

With n ranks, S bytes, latency a, b = 1 / bandwidth, o = a * OVERHEAD, f = b * FOLD:

    ring              2(n-1) a + (n-1)/n S (2b + f)
    halving-doubling  2 log2(p) a + (p-1)/p S (2b + f), p the largest power of two <= n; plus 2a + S (2b + f) if p < n;
                      up to DOUBLING_BYTES log2(p) (a + S (b + f)) in place of the first two terms
    direct            a + (n-2) o + (n-1) S (b + f)
    tree              one phase up with b + f a byte, one phase down with b a byte

A phase over a tree of depth d whose nodes have k children, with the data in m blocks of s bytes, costs d times the
first block, a + (k-1) o + k s b, and then k (o + s b) for each of the m - 1 blocks that follow it down the pipe.
A broadcast is one phase down and a reduce one phase up: a ring is the tree with k = 1, direct the one with k = n-1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeVar

from ringfort.config import (
    KIB,
    AllReduceStrategy,
    BroadcastStrategy,
    CollectiveConfig,
    ReduceStrategy,
    Shape,
    Strategy,
)
from ringfort.errors import ConfigError, InvalidArgumentError, InvalidWorldSizeError

BLOCK_BYTES: Final = 256 * KIB
"""How large a block of a pipelined tree is: what one system call moves, and what stays in the L2 cache."""

DOUBLING_BYTES: Final = 32 * KIB
"""Up to here halving-doubling does not halve: the number of steps costs more than the bytes."""

OVERHEAD: Final = 0.6
"""The share of a message's latency that its sender is busy with, so that even messages sent at once leave in turn. On
loopback, where the default latency comes from, that is most of it."""

FOLD: Final = 0.2
"""What folding a byte costs, as a share of moving it: memory adds at some 10 GB/s where loopback moves 2."""

TREE_ARITIES: Final = (2, 4)
"""The trees that AUTO weighs. Wider ones come close to direct, which it weighs too."""

S = TypeVar("S", bound=Strategy)


@dataclass(frozen=True)
class CostModel:
    """Predicts seconds. The absolute numbers are rough; what counts is their order."""

    latency: float
    """Seconds that one message costs however small."""
    bandwidth: float
    """Bytes a second that one link carries, each way."""

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "must be a positive number")

    def predict(self, shape: Shape, world_size: int, nbytes: int, arity: int = 2) -> float:
        """Seconds that an all-reduce of `nbytes` takes."""
        _check(world_size, nbytes)
        n, a, b = world_size, self.latency, 1 / self.bandwidth
        both_ways = 2 * b + FOLD * b
        if n == 1:
            return 0.0
        if shape is Shape.RING:
            return 2 * (n - 1) * a + (n - 1) / n * nbytes * both_ways
        if shape is Shape.HALVING_DOUBLING:
            power = n.bit_length() - 1
            core = 1 << power
            fold_in = 2 * a + nbytes * both_ways if core < n else 0.0
            if nbytes <= DOUBLING_BYTES:
                return power * (a + nbytes * (b + FOLD * b)) + fold_in
            return 2 * power * a + (core - 1) / core * nbytes * both_ways + fold_in
        if shape is Shape.DIRECT:
            return a + (n - 2) * OVERHEAD * a + (n - 1) * nbytes * (b + FOLD * b)
        if shape is Shape.TREE:
            return self.predict_reduce(shape, n, nbytes, arity) + self.predict_broadcast(shape, n, nbytes, arity)
        raise InvalidArgumentError("shape", shape, "has no cost of its own")

    def predict_broadcast(self, shape: Shape, world_size: int, nbytes: int, arity: int = 2) -> float:
        """Seconds that a broadcast of `nbytes` takes."""
        return self._phase(_fan_out(shape, world_size, arity), world_size, nbytes, 1 / self.bandwidth)

    def predict_reduce(self, shape: Shape, world_size: int, nbytes: int, arity: int = 2) -> float:
        """Seconds that a reduce of `nbytes` takes."""
        return self._phase(_fan_out(shape, world_size, arity), world_size, nbytes, (1 + FOLD) / self.bandwidth)

    def _phase(self, arity: int, world_size: int, nbytes: int, per_byte: float) -> float:
        _check(world_size, nbytes)
        children = min(arity, world_size - 1)
        overhead = OVERHEAD * self.latency
        blocks = max(1, -(-nbytes // BLOCK_BYTES))
        moving = nbytes / blocks * per_byte
        first = self.latency + (children - 1) * overhead + children * moving
        return tree_depth(world_size, arity) * first + (blocks - 1) * children * (overhead + moving)


def tree_depth(world_size: int, arity: int) -> int:
    """The levels below the root of a tree of `world_size` nodes, filled level by level."""
    depth, width, held = 0, 1, 1
    while held < world_size:
        width *= arity
        held += width
        depth += 1
    return depth


def choose_all_reduce(config: CollectiveConfig, world_size: int, nbytes: int) -> AllReduceStrategy:
    """The configured strategy, or where that is AUTO the cheapest by the model. Never AUTO."""
    if config.all_reduce.shape is not Shape.AUTO:
        return config.all_reduce
    return _cheapest_all_reduce(config.latency, config.bandwidth, world_size, nbytes)


def choose_reduce(config: CollectiveConfig, world_size: int, nbytes: int) -> ReduceStrategy:
    """As `choose_all_reduce`, for a reduce."""
    if config.reduce.shape is not Shape.AUTO:
        return config.reduce
    return _cheapest_reduce(config.latency, config.bandwidth, world_size, nbytes)


def choose_broadcast(config: CollectiveConfig, world_size: int, nbytes: int) -> BroadcastStrategy:
    """As `choose_all_reduce`, for a broadcast."""
    if config.broadcast.shape is not Shape.AUTO:
        return config.broadcast
    return _cheapest_broadcast(config.latency, config.bandwidth, world_size, nbytes)


# Programs repeat a few sizes for ever, and weighing the candidates costs as much as a small message.
_REMEMBERED: Final = 1024


@lru_cache(maxsize=_REMEMBERED)
def _cheapest_all_reduce(latency: float, bandwidth: float, world_size: int, nbytes: int) -> AllReduceStrategy:
    model = CostModel(latency, bandwidth)
    shapes = (Shape.DIRECT, Shape.RING, Shape.HALVING_DOUBLING)
    return min(
        _candidates(AllReduceStrategy, shapes), key=lambda s: model.predict(s.shape, world_size, nbytes, s.arity)
    )


@lru_cache(maxsize=_REMEMBERED)
def _cheapest_reduce(latency: float, bandwidth: float, world_size: int, nbytes: int) -> ReduceStrategy:
    predict = CostModel(latency, bandwidth).predict_reduce
    shapes = (Shape.DIRECT, Shape.RING)
    return min(_candidates(ReduceStrategy, shapes), key=lambda s: predict(s.shape, world_size, nbytes, s.arity))


@lru_cache(maxsize=_REMEMBERED)
def _cheapest_broadcast(latency: float, bandwidth: float, world_size: int, nbytes: int) -> BroadcastStrategy:
    predict = CostModel(latency, bandwidth).predict_broadcast
    shapes = (Shape.DIRECT, Shape.RING)
    return min(_candidates(BroadcastStrategy, shapes), key=lambda s: predict(s.shape, world_size, nbytes, s.arity))


def _candidates(kind: type[S], shapes: tuple[Shape, ...]) -> list[S]:
    return [*(kind(shape) for shape in shapes), *(kind.tree(arity) for arity in TREE_ARITIES)]


def _fan_out(shape: Shape, world_size: int, arity: int) -> int:
    if shape is Shape.RING:
        return 1
    if shape is Shape.DIRECT:
        return max(1, world_size - 1)
    if shape is Shape.TREE:
        return arity
    raise InvalidArgumentError("shape", shape, "is no way from or to one root")


def _check(world_size: int, nbytes: int) -> None:
    if world_size < 1:
        raise InvalidWorldSizeError(world_size)
    if nbytes < 0:
        raise InvalidArgumentError("nbytes", nbytes, "must not be negative")
