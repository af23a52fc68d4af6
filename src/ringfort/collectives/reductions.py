"""The collectives that compute: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ringfort.backends.base import Backend
from ringfort.collectives import algorithms, cost_model, native, persistent, reduction, shared_memory, signature
from ringfort.collectives.algorithms import Span
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.operation import Memory, Operation, check_root, run_ring, run_steps
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.parallel import may_split, over_connections
from ringfort.collectives.reduction import ElementType
from ringfort.collectives.signature import Collective
from ringfort.config import AllReduceStrategy, ReduceStrategy, Shape, Strategy
from ringfort.errors import InvalidArgumentError
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array, Reducer


def all_reduce(
    backend: Backend,
    x: Any,
    op: Op = ReduceOp.SUM,
    *,
    strategy: AllReduceStrategy | None = None,
    timeout: float | None = None,
) -> Operation:
    """Every rank's `x` becomes the reduction of all of them, in place."""
    asked = _resolve(strategy, AllReduceStrategy)
    ready = persistent.ready(backend, x, op) if asked is None and timeout in (None, backend.config.timeout) else None
    if ready is not None:
        return Operation("all_reduce", x.nbytes, ready)
    by_engine = native.all_reduce(backend, x, op, asked, timeout)
    if by_engine is not None:
        return by_engine
    view = as_view(x, "x", writable=True)
    reducer = reduction.reducer(op, view.kind)
    config, n = backend.config.collective, backend.world_size
    settled = cost_model.settle(backend, asked or AllReduceStrategy.AUTO, view.flat.nbytes, view.kind.name)
    may_share = asked is None and config.all_reduce.shape is Shape.AUTO and backend.shares_memory
    call = _call(Collective.ALL_REDUCE, view, op, None if may_share else settled)
    backend.check_timeout(timeout)

    def run() -> Any:
        flat, kind = view.flat, view.kind
        meeting = backend.envelope(call, timeout) if may_share else None
        arena = None if meeting is None else backend.arena(meeting)
        if meeting is not None and arena is not None:
            reduction.scale_before(op, kind, flat)
            shared_reducer = shared_memory.SharedReducer.of(reducer, reduction.closing_reducer(op, kind, n))
            with arena:
                shared_memory.all_reduce(arena, flat, shared_reducer, meeting)
            # Not bfloat16, which looks like uint16 there.
            if isinstance(op, ReduceOp) and kind.kind == flat.dtype.kind:
                persistent.remember(
                    backend, op, flat, persistent.over_arena(backend, arena, call, flat.size, shared_reducer)
                )
        elif n == 1:
            backend.envelope(call, timeout)
            reduction.scale_before(op, kind, flat)
        else:
            chosen, envelope = cost_model.begin(backend, settled, flat.nbytes, kind.name, call, timeout)

            def move(connection: Backend, span: Span) -> None:
                _all_reduce_by(chosen, connection, flat[span[0] : span[1]], kind, op, envelope)

            over_connections(backend, flat, envelope, move)
            is_usual = asked is None and kind.kind == flat.dtype.kind
            if is_usual and isinstance(op, ReduceOp) and not may_split(backend, flat.nbytes):
                shared_reducer = shared_memory.SharedReducer.of(reducer, reduction.closing_reducer(op, kind, n))
                persistent.remember(
                    backend, op, flat, persistent.OverLinks.suited(backend, chosen, call, flat, shared_reducer)
                )
        return view.finish()

    return Operation("all_reduce", view.flat.nbytes, run)


def _all_reduce_by(
    strategy: AllReduceStrategy, backend: Backend, flat: Array, kind: ElementType, op: Op, envelope: Envelope
) -> None:
    if strategy.shape is Shape.DIRECT:
        _direct_all_reduce(backend, flat, kind, op, envelope)
        return
    if strategy.shape is Shape.HALVING_DOUBLING and flat.nbytes <= cost_model.DOUBLING_BYTES:
        _doubling_all_reduce(backend, flat, kind, op, envelope)
        return
    reducers = _Reducers(op, kind, flat, backend.world_size)
    if strategy.shape is Shape.RING:
        steps = algorithms.ring_all_reduce(backend.rank, backend.world_size, flat.size, backend.ring)
        run_ring(backend, steps, Memory(flat), envelope, reducer=reducers)
    else:
        run_steps(backend, _all_reduce_steps(backend, strategy, flat), Memory(flat), envelope, reducer=reducers)


def _all_reduce_steps(backend: Backend, strategy: Strategy, flat: Array) -> Iterable[algorithms.Step]:
    rank, n = backend.rank, backend.world_size
    if strategy.shape is Shape.HALVING_DOUBLING:
        return algorithms.halving_doubling_all_reduce(rank, n, flat.size)
    if strategy.shape is Shape.HIERARCHICAL:
        return algorithms.hierarchical_all_reduce(rank, backend.hosts, flat.size)
    return algorithms.tree_all_reduce(rank, n, flat.size, strategy.arity, block_of(flat))


class _Reducers:
    """Which reduce a step needs. What the op scales is scaled on the way, while it is in the cache: a PREMUL_SUM's
    elements when they are first sent or reduced into, a MEAN's when they are whole."""

    def __init__(self, op: Op, kind: ElementType, flat: Array, world_size: int) -> None:
        self._op, self._kind, self._flat = op, kind, flat
        self._plain = reduction.reducer(op, kind)
        self._closing = reduction.closing_reducer(op, kind, world_size)
        self._handshake = reduction.opening_reducer(op, kind)
        self._untouched: list[Span] = [(0, flat.size)] if reduction.needs_scale_before(op) and flat.size else []

    def __call__(self, step: algorithms.Step) -> Reducer | None:
        if self._untouched and step.out is not None:
            self._scale(self._touch(step.out))
        if not step.reducer or step.into is None:
            return None
        if self._untouched:
            fresh = self._touch(step.into)
            if fresh == [step.into]:
                return self._handshake
            self._scale(fresh)
        return self._plain if step.finish is None else self._closing

    def _touch(self, span: Span) -> list[Span]:
        """What of `span` was untouched until now."""
        fresh: list[Span] = []
        left: list[Span] = []
        for start, stop in self._untouched:
            low, high = max(start, span[0]), min(stop, span[1])
            if low >= high:
                left.append((start, stop))
                continue
            fresh.append((low, high))
            left.extend(rest for rest in ((start, low), (high, stop)) if rest[0] < rest[1])
        self._untouched = left
        return fresh

    def _scale(self, spans: list[Span]) -> None:
        for start, stop in spans:
            reduction.scale_before(self._op, self._kind, self._flat[start:stop])


def _direct_all_reduce(backend: Backend, flat: Array, kind: ElementType, op: Op, envelope: Envelope) -> None:
    """Everybody sends to everybody: one step however many ranks. All reduce in the order of the ranks, since not even a
    sum of two is the same both ways round (the payload of a NaN, the sign of a smallest zero)."""
    rank, n = backend.rank, backend.world_size
    reducer, block = reduction.reducer(op, kind), block_of(flat)
    total = np.empty(min(block, flat.size), flat.dtype)
    for start in range(0, max(flat.size, 1), block):
        own = flat[start : start + block]
        reduction.scale_before(op, kind, own)
        into = total[: own.size]
        if n == 2:
            other = 1 - rank
            if rank == 0:
                into[...] = own
                backend.exchange(own, other, into, other, reduce=reducer, tag=envelope)
            else:
                backend.exchange(own, other, into, other, tag=envelope)
                reducer.apply(into, own)
        else:
            for dst, _ in algorithms.exchange_order(rank, n):
                backend.send(own, dst, tag=envelope)
            for src in range(n):
                if src != rank:
                    backend.recv(into, src, reduce=reducer if src else None, tag=envelope)
                elif src == 0:
                    into[...] = own
                else:
                    reducer.apply(into, own)
        reduction.scale_after(op, kind, into, n)
        own[...] = into


def _doubling_all_reduce(backend: Backend, flat: Array, kind: ElementType, op: Op, envelope: Envelope) -> None:
    """Partners exchange all they have, at doubling distances. As above, the lower rank's elements come first."""
    rank, n = backend.rank, backend.world_size
    reducer = reduction.reducer(op, kind)
    reduction.scale_before(op, kind, flat)
    helper, partners = algorithms.doubling_all_reduce(rank, n)
    if helper is not None and not partners:
        backend.send(flat, helper, tag=envelope)
        backend.recv(flat, helper, tag=envelope)
        return
    if helper is not None:
        backend.recv(flat, helper, reduce=reducer, tag=envelope)
    both = np.empty_like(flat)
    for partner in partners:
        if rank < partner:
            both[...] = flat
            backend.exchange(flat, partner, both, partner, reduce=reducer, tag=envelope)
        else:
            backend.exchange(flat, partner, both, partner, tag=envelope)
            reducer.apply(both, flat)
        flat[...] = both
    reduction.scale_after(op, kind, flat, n)
    if helper is not None:
        backend.send(flat, helper, tag=envelope)


def reduce(
    backend: Backend,
    x: Any,
    root: int = 0,
    op: Op = ReduceOp.SUM,
    *,
    strategy: ReduceStrategy | None = None,
    timeout: float | None = None,
) -> Operation:
    """The root's `x` becomes the reduction of all, in place; the others keep theirs."""
    check_root(backend, root)
    rank, n = backend.rank, backend.world_size
    view = as_view(x, "x", writable=rank == root)
    reducer = reduction.reducer(op, view.kind)
    asked = _resolve(strategy, ReduceStrategy) or ReduceStrategy.AUTO
    settled = cost_model.settle(backend, asked, view.flat.nbytes, view.kind.name)
    call = _call(Collective.REDUCE, view, op, settled, root)
    backend.check_timeout(timeout)

    def run() -> Any:
        flat, kind = view.flat, view.kind
        block = block_of(flat)
        chosen, envelope = cost_model.begin(backend, settled, flat.nbytes, kind.name, call, timeout)

        def move(connection: Backend, span: Span) -> None:
            part = flat[span[0] : span[1]]
            steps = algorithms.reduce_up(links_by(chosen, connection, root, part), part.size, block)
            if rank == root:
                run_steps(connection, steps, Memory(part), envelope, reducer=_Reducers(op, kind, part, n))
                return
            steps = _Staged(part, kind, op, block, steps)
            first = envelope._replace(sync=True)
            run_steps(
                connection,
                steps,
                steps.memory,
                envelope,
                reducer=lambda step: reducer if step.reducer else None,
                first=first,
            )

        if n == 1:
            reduction.scale_before(op, kind, flat)
        else:
            over_connections(backend, flat, envelope, move)
        return view.finish() if rank == root else x

    return Operation("reduce", view.flat.nbytes, run)


class _Staged:
    """A reduce's steps at a rank that keeps its array: a block is copied to a scratch of two before it is touched."""

    def __init__(self, flat: Array, kind: ElementType, op: Op, block: int, steps: Iterable[algorithms.Step]) -> None:
        self._flat, self._kind, self._op, self._block = flat, kind, op, block
        self._scratch = np.empty(min(2 * block, max(flat.size, 1)), flat.dtype)
        self._steps = steps
        self.memory = Memory(self._scratch)

    def __iter__(self) -> Any:
        staged: Span | None = None
        for step in self._steps:
            span = step.into or step.out
            if span is not None and span != staged and (step.src is not None or staged is None or span[0] > staged[0]):
                staged = span
                place = self._place(span)
                copy = self._scratch[place[0] : place[1]]
                copy[...] = self._flat[span[0] : span[1]]
                reduction.scale_before(self._op, self._kind, copy)
            yield step._replace(
                out=None if step.out is None else self._place(step.out),
                into=None if step.into is None else self._place(step.into),
            )

    def _place(self, span: Span) -> Span:
        start = span[0] % (2 * self._block)
        return start, start + span[1] - span[0]


def reduce_scatter(backend: Backend, x: Any, op: Op = ReduceOp.SUM, *, timeout: float | None = None) -> Operation:
    """`x` has a part for each rank along its first axis; returns the reduction of this rank's parts. `x` is kept."""
    rank, n = backend.rank, backend.world_size
    by_engine = native.reduce_scatter(backend, x, op, timeout)
    if by_engine is not None:
        return by_engine
    view = as_view(x, "x")
    check_parts(view, n)
    reduction.reducer(op, view.kind)  # raises where they do not fit
    call = _call(Collective.REDUCE_SCATTER, view, op)
    backend.check_timeout(timeout)

    def run() -> Any:
        envelope = backend.envelope(call, timeout)
        result = view.new(view.shape[1:])
        flat, kind = result.flat, view.kind
        flat[...] = view.part(rank)
        if n == 1:
            reduction.scale_before(op, kind, flat)
        # What a rank sends must be scaled too, and `x` kept: then block by block, through a copy.
        scaled = reduction.needs_scale_before(op)
        block = block_of(flat) if scaled else max(flat.size, 1)

        def move(connection: Backend, whole: Span) -> None:
            reducers = _Reducers(op, kind, flat, n)
            for turn, (dst, src) in enumerate(algorithms.exchange_order(rank, n), start=2):
                part = view.part(dst)
                for start in range(whole[0], max(whole[1], whole[0] + 1), block):
                    span = start, min(start + block, whole[1])
                    out = part[span[0] : span[1]]
                    if scaled:
                        out = out.copy()
                        reduction.scale_before(op, kind, out)
                    reduce = reducers(algorithms.Step(None, None, src, span, True, span if turn == n else None))
                    connection.exchange(out, dst, flat[span[0] : span[1]], src, reduce=reduce, tag=envelope)

        over_connections(backend, flat, envelope, move)
        return result.finish()

    return Operation("reduce_scatter", view.flat.nbytes, run)


def block_of(flat: Array) -> int:
    """Elements in a block of a pipelined plan."""
    return max(1, cost_model.BLOCK_BYTES // flat.itemsize)


def links_by(strategy: Strategy, backend: Backend, root: int, flat: Array) -> algorithms.Links:
    """Whom this rank hears from and tells in a reduce or a broadcast: a ring is a tree of one child each, direct a tree
    of one level."""
    rank, n = backend.rank, backend.world_size
    if strategy.shape is Shape.HIERARCHICAL:
        return algorithms.host_links(rank, backend.hosts, root, is_pipelined=flat.size > block_of(flat))
    arity = {Shape.RING: 1, Shape.TREE: strategy.arity}.get(strategy.shape, max(1, n - 1))
    return algorithms.tree_links(rank, n, root, arity)


def check_parts(view: ArrayView, world_size: int, name: str = "x") -> None:
    """Raises unless the array's first axis has one part a rank."""
    if not view.shape or view.shape[0] != world_size:
        raise InvalidArgumentError(
            name, f"array of shape {view.shape}", f"its first axis must have one part for each of {world_size} ranks"
        )


def _resolve(strategy: Any, kind: type[Any]) -> Any:
    """The strategy of a call, or None where the configured one or the model decides."""
    if strategy is not None and not isinstance(strategy, kind):
        raise InvalidArgumentError("strategy", strategy, f"must be a {kind.__name__}, such as {kind.__name__}.RING")
    return None if strategy is None or strategy.shape is Shape.AUTO else strategy


def _call(what: Collective, view: ArrayView, op: Op, strategy: Strategy | None = None, root: int = 0) -> bytes:
    return signature.encode(
        what, kind=view.kind.code, count=view.flat.size, op=reduction.code_of(op), root=root, strategy=strategy
    )
