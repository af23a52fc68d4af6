"""Which way the data should take: a cost model fed with what the links cost, and the choice it makes.

Every rank must choose the same from the same arguments, so the model is plain arithmetic on a table that all ranks have
alike: no clocks, and ties go to the earlier candidate.

Where all links are alike, with n ranks, S bytes, an exchange's latency a, b seconds a byte, f seconds to reduce one, o
seconds that a rank is busy with a message, t the share of an exchange that a message alone takes, and c = f for a copy
within memory:

    ring              2(n-1) a + (n-1)/n S (2b + f); where slices are passed on while they arrive
                      (`Group.pipelined_ring`), of each a but the first only what is longer than the S/n b of the slice
                      before
    halving-doubling  2 log2(p) a + (p-1)/p S (2b + f), p the largest power of two <= n; plus 2ta + S (2b + f) if p < n;
                      up to DOUBLING_BYTES log2(p) (a + S (b + f + 2c)) in place of the first two terms
    direct            for each of m blocks a + (n-2) o, and in all S ((n-1) (b + f) + 2c)
    hierarchical      in a host of h ranks and with l lanes 2(h-1) a + (h-1)/l S (2b + f), and a ring of hosts with S/l
    tree              one phase up with b + f a byte, one phase down with b a byte

Where they differ, a step costs what its slowest link does. A phase over a tree of depth d whose nodes have k children,
with the data in m blocks of s bytes, costs d times the first block, t a + (k-1) o + k s b, and then k (o + s b) for
each of the m - 1 blocks that follow it down the pipe. A broadcast is one phase down and a reduce one phase up: a ring
is the tree with k = 1, direct the one with k = n-1. Hierarchical is a tree of hosts and one inside a host; with more
than one block a chain of all ranks, host by host.

Messages inside a host and arithmetic are work for its cores. Where a host has w ranks a core, w > 1, what was measured
while all were busy is w times what one alone takes: f is w times as long in a step of all ranks, b a w-th in one of
two, and half of that for a message one way. Direct costs a for each message. A phase of a tree, in which few are busy
at once, takes at least what all cores together need: (n-1)/n (m a + S (b + f)).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple, TypeVar, cast

import numpy as np

from ringfort.backends.group import BARRIER_CALL, Group
from ringfort.collectives import algorithms, link_costs
from ringfort.collectives.link_costs import LinkCosts
from ringfort.collectives.signature import measuring_for
from ringfort.collectives.steps import BLOCK_BYTES
from ringfort.config import KIB, AllReduceStrategy, ReduceStrategy, Shape, Strategy
from ringfort.errors import InvalidArgumentError
from ringfort.transport import fast_path
from ringfort.transport.frames import MAX_FRAGMENT
from ringfort.transport.reducer import Array

DOUBLING_BYTES: Final = 64 * KIB
"""Up to here halving-doubling does not halve: the number of steps costs more than the bytes."""

READY_BYTES: Final = 2 * MAX_FRAGMENT
"""Up to here halving-doubling of a power of two is a persistent chain (persistent.py): one frame per partner."""

TREE_ARITIES: Final = (2, 4)
"""The trees that AUTO weighs. Wider ones come close to direct, which it weighs too."""

_REMEMBERED: Final = 1024
"""Choices kept of each group. Programs repeat a few sizes for ever, and weighing the candidates costs as much as a
small message."""

S = TypeVar("S", bound=Strategy)


class _Step(NamedTuple):
    """What an exchange costs: seconds however small it is, seconds for each byte moved, and for each byte added."""

    latency: float
    per_byte: float
    reducer: float


class CostModel:
    """Predicts seconds, for one group. The absolute numbers are rough; what counts is their order."""

    def __init__(self, links: LinkCosts, hosts: tuple[int, ...] | None = None) -> None:
        self.links = links
        self._n = links.world_size
        self._hosts = hosts or tuple(range(self._n))
        self._cheapest = lru_cache(maxsize=_REMEMBERED)(self._weigh)

    def choose(self, kind: type[S], nbytes: int, element: str = "float32") -> S:
        """Return the cheapest strategy of `kind`. Never AUTO."""
        return cast("S", self._cheapest(kind, nbytes, element))

    def _weigh(self, kind: type[S], nbytes: int, element: str) -> S:
        ready = self._ready(kind, nbytes)
        return ready or min(self.candidates(kind), key=lambda strategy: self.predict(strategy, nbytes, element))

    def _ready(self, kind: type[S], nbytes: int) -> S | None:
        """Return the strategy that is fastest because it is a persistent chain (persistent.py): the model ignores that.

        Measured over TCP on one machine: at 4 B to 32 KiB 0.3 to 0.7 of the time of a tree, for 2 and 4 ranks. For two
        of them, one exchange 0.75 of the time of two halves at 128 to 256 KiB, and those 0.65 to 0.85 of a ring's up to
        2 MiB; for 4 ranks 0.5 to 0.8 of the time of the best other at 128 KiB to 2 MiB.
        """
        if kind is not AllReduceStrategy or self._n & (self._n - 1):
            return None
        if self._n == 2 and nbytes <= BLOCK_BYTES:
            return kind(Shape.DIRECT)
        # Of several ranks on each of several hosts, all would send all at once between the hosts.
        largest = DOUBLING_BYTES if 1 < len(set(self._hosts)) < self._n else READY_BYTES
        return kind(Shape.HALVING_DOUBLING) if nbytes <= largest else None

    def candidates(self, kind: type[S]) -> list[S]:
        """Return the strategies that AUTO compares; of equal ones, the first is chosen."""
        shapes = [Shape.DIRECT, Shape.RING]
        if kind is AllReduceStrategy:
            shapes.append(Shape.HALVING_DOUBLING)
        if 1 < len(set(self._hosts)) < self._n:  # else it is a ring
            shapes.append(Shape.HIERARCHICAL)
        # Between two ranks a tree is an exchange whose second half waits for the first.
        arities = TREE_ARITIES if self._n > 2 or not issubclass(kind, AllReduceStrategy) else ()
        return [*(kind(shape) for shape in shapes), *(kind.tree(arity) for arity in arities)]

    def predict(self, strategy: Strategy, nbytes: int, element: str = "float32") -> float:
        """Return the seconds that an all-reduce, a reduce or a broadcast takes, as the type of the strategy says."""
        if nbytes < 0:
            raise InvalidArgumentError("nbytes", nbytes, "must not be negative")
        if strategy.shape is Shape.AUTO:
            raise InvalidArgumentError("strategy", str(strategy), "AUTO has no cost of its own; pass another strategy")
        if self._n == 1:
            return 0.0
        return self.links.start * self.links.crowd + self._moving(strategy, nbytes, self.links.reducer_of(element))

    def _moving(self, strategy: Strategy, nbytes: int, reducer: float) -> float:
        if not isinstance(strategy, AllReduceStrategy):
            reducer = reducer if isinstance(strategy, ReduceStrategy) else 0.0
            if strategy.shape is Shape.HIERARCHICAL:
                return self._hosts_phase(nbytes, reducer)
            arity = {Shape.RING: 1, Shape.DIRECT: self._n - 1}.get(strategy.shape, strategy.arity)
            return self._phase(arity, nbytes, reducer)
        if strategy.shape is Shape.RING:
            return self._ring(list(range(self._n)), nbytes, reducer, is_forwarded=nbytes / self._n > fast_path.LARGEST)
        if strategy.shape is Shape.HALVING_DOUBLING:
            return self._halving_doubling(nbytes, reducer)
        if strategy.shape is Shape.DIRECT:
            return self._direct(nbytes, reducer)
        if strategy.shape is Shape.HIERARCHICAL:
            return self._hierarchical(nbytes, reducer)
        return self._phase(strategy.arity, nbytes, reducer) + self._phase(strategy.arity, nbytes, 0.0)

    # --- shapes ---------------------------------------------------------------------------------------------------

    def _ring(self, members: list[int], nbytes: float, reducer: float, *, is_forwarded: bool) -> float:
        n = len(members)
        step = self._step([(a, members[(i + 1) % n]) for i, a in enumerate(members)], reducer, at_once=self._n)
        hidden = min(step.latency, nbytes / n * step.per_byte) if is_forwarded else 0.0
        waiting = step.latency + (2 * n - 3) * (step.latency - hidden)
        return waiting + (n - 1) / n * nbytes * (2 * step.per_byte + step.reducer)

    def _halving_doubling(self, nbytes: int, reducer: float) -> float:
        core = 1 << (self._n.bit_length() - 1)
        seconds = 0.0
        for distance in (1 << bit for bit in range(core.bit_length() - 1)):
            step = self._step([(rank, rank ^ distance) for rank in range(core)], reducer, at_once=core)
            if nbytes <= DOUBLING_BYTES:
                seconds += step.latency + nbytes * (step.per_byte + 3 * step.reducer)
            else:
                seconds += 2 * step.latency + distance / core * nbytes * (2 * step.per_byte + step.reducer)
        if core < self._n:
            pairs = [(rank, rank - core) for rank in range(core, self._n)]
            step = self._step(pairs, reducer, at_once=2 * len(pairs), one_way=True)
            seconds += 2 * self._alone(pairs) + nbytes * (2 * step.per_byte + step.reducer)
        return seconds

    def _direct(self, nbytes: int, reducer: float) -> float:
        others = self._n - 1
        step = self._step([(a, b) for a in range(self._n) for b in range(self._n) if a != b], reducer, at_once=self._n)
        # Where ranks share cores no message hides behind the wait for another.
        further = self.links.overhead if self.links.crowd == 1.0 else max(self.links.overhead, step.latency)
        starts = max(1, -(-nbytes // BLOCK_BYTES)) * (step.latency + (others - 1) * further)
        return starts + nbytes * (others * (step.per_byte + step.reducer) + 2 * step.reducer)

    def _hierarchical(self, nbytes: int, reducer: float) -> float:
        groups = algorithms.groups_of(self._hosts)
        lanes = min(map(len, groups))
        inside = 0.0
        for group in groups:
            others = len(group) - 1
            if others:
                step = self._step([(a, b) for a in group for b in group if a != b], reducer, at_once=self._n)
                inside = max(inside, others * (2 * step.latency + nbytes / lanes * (2 * step.per_byte + step.reducer)))
        rings = [[group[lane] for group in groups] for lane in range(lanes)]
        return inside + max(self._ring(ring, nbytes / lanes, reducer, is_forwarded=False) for ring in rings)

    def _phase(self, arity: int, nbytes: int, reducer: float) -> float:
        """Return the seconds up or down a tree. The root may be any rank, so the slowest link counts."""
        children = min(arity, self._n - 1)
        if children == 0:
            return 0.0
        edges = [(rank, (rank - 1) // arity) for rank in range(1, self._n)]
        blocks = max(1, -(-nbytes // BLOCK_BYTES))
        step = self._step(edges, reducer, at_once=2, one_way=True)
        moving = nbytes / blocks * (step.per_byte + step.reducer)
        overhead = self.links.overhead / self.links.crowd
        first = self._alone(edges) + (children - 1) * overhead + children * moving
        seconds = tree_depth(self._n, arity) * first + (blocks - 1) * children * (overhead + moving)
        return max(seconds, self._work(blocks, nbytes, reducer))

    def _hosts_phase(self, nbytes: int, reducer: float) -> float:
        """Return the seconds up or down a tree that enters every host once: see `algorithms.host_links`."""
        pairs = [(a, b) for a in range(self._n) for b in range(a)]
        groups = algorithms.groups_of(self._hosts)
        most = max(map(len, groups))
        overhead, blocks = self.links.overhead / self.links.crowd, max(1, -(-nbytes // BLOCK_BYTES))
        arity = 1 if blocks > 1 else 2
        seconds, slowest = 0.0, 0.0
        for crosses, places in ((True, len(groups)), (False, most)):
            edges = [(a, b) for a, b in pairs if (self._hosts[a] != self._hosts[b]) == crosses]
            step = self._step(edges, reducer, at_once=2, one_way=True)
            children, moving = min(arity, places - 1), nbytes / blocks * (step.per_byte + step.reducer)
            hops = tree_depth(places, arity) if crosses or arity > 1 else self._n - len(groups)
            seconds += hops * (self._alone(edges) + (children - 1) * overhead + children * moving)
            slowest = max(slowest, overhead + moving)
        return max(seconds + (blocks - 1) * slowest, self._work(blocks, nbytes, reducer))

    # --- what a step is made of -----------------------------------------------------------------------------------

    def _step(self, pairs: list[tuple[int, int]], reducer: float, *, at_once: int, one_way: bool = False) -> _Step:
        """Return the cost of the slowest of some links, each way, while `at_once` ranks of the group are busy. Links
        inside a host were measured with all its ranks busy, each sending one message and receiving one."""
        if not pairs:
            return _Step(0.0, 0.0, 0.0)
        busy = max(1.0, self.links.crowd * at_once / self._n)
        a, b = np.array(pairs).T
        hosts = np.array(self._hosts)
        inside = hosts[a] == hosts[b]
        alone = busy / self.links.crowd

        def slowest(figure: Array, share: float) -> float:
            return float((np.maximum(figure[a, b], figure[b, a]) * np.where(inside, share, 1.0)).max())

        per_byte = slowest(self.links.per_byte, alone / 2 if one_way else alone)
        return _Step(slowest(self.links.latency, alone), per_byte, reducer * busy)

    def _alone(self, pairs: list[tuple[int, int]]) -> float:
        """Return the seconds of a small message that travels alone, over the slowest of some links."""
        return self.links.hop * self._step(pairs, 0.0, at_once=self._n).latency

    def _work(self, blocks: int, nbytes: int, reducer: float) -> float:
        """Return the seconds that the cores take for a phase of a tree, however well it is pipelined, if ranks share
        cores: of n ranks, all but one receive each block, as in n-1 of n exchanges that all make at once."""
        if self.links.crowd == 1.0:
            return 0.0
        pairs = [(a, b) for a in range(self._n) for b in range(a) if self._hosts[a] == self._hosts[b]]
        step = self._step(pairs, reducer, at_once=self._n)
        return (self._n - 1) / self._n * (blocks * step.latency + nbytes * (step.per_byte + step.reducer))


def tree_depth(world_size: int, arity: int) -> int:
    """Return the levels below the root of a tree of `world_size` nodes, filled level by level."""
    depth, place = 0, world_size - 1  # from the last node up
    while place > 0:
        place = (place - 1) // arity
        depth += 1
    return depth


# --- what a collective asks -------------------------------------------------------------------------------------------


def needs_measuring(group: Group) -> bool:
    """Whether the links' costs are to be measured: the same at every rank, and at every call."""
    config = group.config.collective
    return group.is_measured and group.world_size > 1 and (config.latency is None or config.bandwidth is None)


def model_of(group: Group, call: bytes = BARRIER_CALL, timeout: float | None = None) -> CostModel:
    """Return the group's model. Where the links have to be measured for it, all ranks must ask for it the first time,
    at the same place among their collectives: measuring is one, on behalf of `call`, which `timeout` bounds."""

    def make() -> CostModel:
        config = group.config.collective
        if needs_measuring(group):
            links = link_costs.measure(group, group.envelope(measuring_for(call), timeout))
        else:
            links = LinkCosts.even(group.world_size)
        return CostModel(links.with_known(config.latency, config.bandwidth), group.hosts)

    return group.part(CostModel, make)


def check_strategy(strategy: S | None, configured: S) -> S:
    """Return the strategy of a call, or where that is None or AUTO the configured one, which may be AUTO too."""
    kind = type(configured)
    if strategy is not None and not isinstance(strategy, kind):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgumentError("strategy", strategy, f"must be a {kind.__name__}, such as {kind.__name__}.RING")
    return configured if strategy is None or strategy.shape is Shape.AUTO else strategy


def settle(group: Group, asked: S, nbytes: int, element: str = "float32") -> S:
    """Return `asked`, or where that is AUTO the cheapest by the model. AUTO remains where links have to be measured for
    that: then `choose` decides when the collective is first run."""
    if asked.shape is not Shape.AUTO or needs_measuring(group):
        return asked
    return model_of(group).choose(type(asked), nbytes, element)


def choose(group: Group, settled: S, nbytes: int, element: str, call: bytes, timeout: float | None) -> S:
    """Return the strategy of a collective that runs now: what `settle` gave, or where that is AUTO the cheapest by the
    measured model. Measuring is a collective that comes first."""
    if settled.shape is not Shape.AUTO:
        return settled
    return model_of(group, call, timeout).choose(type(settled), nbytes, element)
