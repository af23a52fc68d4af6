"""all_reduce: every rank's array becomes the reduction of all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ringfort.backends.group import Group, RingStep, as_bytes
from ringfort.collectives import algorithms, channels, cost_model, native, persistent, reduction, shared_memory
from ringfort.collectives.algorithms import Span, Step
from ringfort.collectives.arrays import ArrayView
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.parallel import may_split, over_connections
from ringfort.collectives.parts import check_alike
from ringfort.collectives.plan import Operation, Plan, Run, planned
from ringfort.collectives.reduction import ElementType
from ringfort.collectives.signature import Collective, encode
from ringfort.collectives.steps import Memory, Reducers, block_of, run_ring, run_steps
from ringfort.collectives.tensors import operation, view_for
from ringfort.config import AllReduceStrategy, Shape
from ringfort.errors import InvalidArgumentError
from ringfort.transport.arena import Arena
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array, Reducer


def all_reduce(
    group: Group,
    x: Any,
    op: Op,
    *,
    out: Any = None,
    strategy: AllReduceStrategy | None = None,
    timeout: float | None = None,
) -> Operation:
    """Reduce every rank's `x` in place: afterwards, each `x` is the reduction of all of them. With `out` that is, and
    `x` is kept. Ranks with `out` and ranks without may be in one call."""
    asked = cost_model.check_strategy(strategy, group.config.collective.all_reduce)
    view = view_for(group, x, writable=out is None)
    into = view if out is None else view_for(group, out, "out", writable=True)
    is_apart = into is not view
    if is_apart:
        check_alike("out", into.kind, into.size, view.kind, view.size)
        if into.device != view.device:
            why = f"must be where x is, on {view.device or 'the CPU'}"
            raise InvalidArgumentError("out", f"array on {into.device or 'the CPU'}", why)
    arrays = (into.flat, view.flat) if is_apart else (view.flat,)
    key = ("all_reduce", view.kind, view.size, op, strategy, view.device, is_apart)
    plan = planned(
        group, key if isinstance(op, ReduceOp) else None, lambda: _plan(group, into, op, asked, is_apart=is_apart)
    )
    return operation(group, "all_reduce", into, plan, into.finish, timeout, *arrays)


def _plan(group: Group, view: ArrayView, op: Op, asked: AllReduceStrategy, *, is_apart: bool) -> Plan:
    kind, count, nbytes = view.kind, view.size, view.nbytes
    reducer = reduction.reducer(op, kind)  # raises where they do not fit
    by_engine = native.all_reduce(group, view, op) if native.may_use_engine(group, asked) else native.none_for(view)
    if by_engine is not None:
        return _copied_first_to(by_engine) if is_apart else by_engine
    may_share = asked.shape is Shape.AUTO and group.shares_memory
    settled = cost_model.settle(group, asked, nbytes, kind.name)  # AUTO if the links have to be measured first
    told = None if may_share else settled  # the peers compare it; ranks that share memory need no strategy
    call = encode(Collective.ALL_REDUCE, kind=kind.code, count=count, op=reduction.code_of(op), strategy=told)
    is_configured = asked is group.config.collective.all_reduce
    is_usual = isinstance(op, ReduceOp) and is_configured and kind.kind == kind.storage.kind  # not bfloat16

    def decide(timeout: float | None) -> Run:
        closing = reduction.closing_reducer(op, kind, group.world_size)
        shared_reducer = shared_memory.SharedReducer.of(reducer, closing)
        arena = group.arena(call, timeout) if may_share else None
        if arena is not None and is_apart and not reduction.needs_scale_before(op):
            apart = persistent.over_arena_apart(group, arena, call, count, shared_reducer)
            if apart is not None:
                return apart
        chosen = settled if arena is not None else cost_model.choose(group, settled, nbytes, kind.name, call, timeout)
        if arena is None and isinstance(op, ReduceOp) and _suits_channels(group, asked, chosen, nbytes):
            is_sure = chosen.shape is Shape.HIERARCHICAL or not channels.are_between_hosts(group)
            found = channels.channels_of(group, nbytes, call, timeout, is_sure=is_sure)
            if found is not None:
                reducer_of = partial(_reducer_of, reducer=reducer, closing=closing)
                # The same order too, so that a result does not depend on which of them was faster.
                alike = AllReduceStrategy.RING
                if channels.are_between_hosts(group):
                    alike = AllReduceStrategy.HIERARCHICAL
                one_thread = decide_in_place(arena, alike, closing, shared_reducer)
                shape = count, kind.itemsize
                return channels.all_reduce(group, found, call, shape, reducer_of, one_thread)[is_apart]
        in_place = decide_in_place(arena, chosen, closing, shared_reducer)
        return _copied_first(in_place) if is_apart else in_place

    def decide_in_place(
        arena: Arena | None,
        chosen: AllReduceStrategy,
        closing: Reducer,
        shared_reducer: shared_memory.SharedReducer,
    ) -> Run:
        n = group.world_size
        if arena is not None:
            run = persistent.over_arena(group, arena, call, count, shared_reducer)
            return run if not reduction.needs_scale_before(op) else _scaled_first(run, op, kind)
        if n > 1 and is_usual and not may_split(group, nbytes):
            chain = persistent.over_links(group, chosen, call, count, shared_reducer)
            if chain is not None:
                return chain
            if chosen.shape is Shape.RING:
                return _prepared_ring(group, call, count, reducer, closing)

        def run(flat: Array, timeout: float | None = None) -> None:
            envelope = group.envelope(call, timeout)
            if n == 1:
                reduction.scale_before(op, kind, flat)
                return

            def move(connection: Group, span: Span) -> None:
                _by_strategy(chosen, connection, flat[span[0] : span[1]], kind, op, envelope)

            over_connections(group, flat, envelope, move)

        return run

    plan = Plan.undecided(decide)
    if is_usual and view.device is None and not is_apart:
        key = (kind.storage, count) if op is ReduceOp.SUM else (kind.storage, count, id(op))
        group.keep_fast(key, plan)
    return plan


def _suits_channels(group: Group, asked: AllReduceStrategy, chosen: AllReduceStrategy, nbytes: int) -> bool:
    """Whether a ring over channels is as good as what was chosen, or better. The same at every rank."""
    shapes = (Shape.RING, Shape.HALVING_DOUBLING, Shape.DIRECT) if asked.shape is Shape.AUTO else (Shape.RING,)
    if channels.are_between_hosts(group):  # not round a ring of all ranks: inside a host there is shared memory
        if group.config.collective.connections != "auto":
            return False
        # The model knows one thread. Where each rank takes part between the hosts, channels make up for more than that.
        is_free = asked.shape is Shape.AUTO and sum(map(len, algorithms.lanes(group.hosts))) == group.world_size
        shapes = (Shape.HIERARCHICAL, *shapes) if is_free else (Shape.HIERARCHICAL,)
    return group.world_size > 1 and nbytes >= channels.LEAST and chosen.shape in shapes


def _prepared_ring(group: Group, call: bytes, count: int, reducer: Reducer, closing: Reducer) -> Run:
    """A pipelined ring over one connection, whose steps are worked out beforehand."""
    steps = algorithms.ring_all_reduce(group.rank, group.world_size, count, group.ring)
    dst, src, size = steps[0].dst, steps[0].src, reducer.dtype.itemsize
    assert dst is not None
    assert src is not None
    ring = [(_bytes(step.out, size), _bytes(step.into, size), _reducer_of(step, reducer, closing)) for step in steps]

    def run(flat: Array, timeout: float | None = None) -> None:
        data = as_bytes(flat, "x", writable=True)
        ring_steps = [RingStep(data[out], data[into], reduce) for out, into, reduce in ring]
        group.pipelined_ring(ring_steps, dst, src, group.envelope(call, timeout))

    return run


def _bytes(span: Span | None, size: int) -> slice:
    assert span is not None
    return slice(size * span[0], size * span[1])


def _reducer_of(step: Step, reducer: Reducer, closing: Reducer) -> Reducer | None:
    if not step.reduces:
        return None
    return reducer if step.finish is None else closing


def _copied_first_to(plan: Plan) -> Plan:
    def run(flat: Any, timeout: float | None = None) -> None:
        plan.run(flat, timeout=timeout)  # which may be another one after its first run

    return Plan(_copied_first(run))


def _copied_first(run: Run) -> Run:
    def copied(flat: Any, source: Any, timeout: float | None = None) -> None:
        flat[...] = source
        run(flat, timeout)

    return copied


def _scaled_first(run: Run, op: Op, kind: ElementType) -> Run:
    def scaled(flat: Array, timeout: float | None = None) -> None:
        reduction.scale_before(op, kind, flat)
        run(flat, timeout)

    return scaled


def _by_strategy(
    strategy: AllReduceStrategy, group: Group, flat: Array, kind: ElementType, op: Op, envelope: Envelope
) -> None:
    rank, n, shape = group.rank, group.world_size, strategy.shape
    if shape is Shape.DIRECT:
        _direct(group, flat, kind, op, envelope)
        return
    if shape is Shape.HALVING_DOUBLING and flat.nbytes <= cost_model.DOUBLING_BYTES:
        _doubling(group, flat, kind, op, envelope)
        return
    reducers, memory = Reducers(op, kind, flat, n), Memory(flat)
    if shape is Shape.RING:
        ring = algorithms.ring_all_reduce(rank, n, flat.size, group.ring)
        run_ring(group, ring, memory, envelope, reducer=reducers)
        return
    if shape is Shape.HALVING_DOUBLING:
        steps = algorithms.halving_doubling_all_reduce(rank, n, flat.size)
    elif shape is Shape.HIERARCHICAL:
        steps = algorithms.hierarchical_all_reduce(rank, group.hosts, flat.size)
    else:
        steps = algorithms.tree_all_reduce(rank, n, flat.size, strategy.arity, block_of(flat))
    run_steps(group, steps, memory, envelope, reducer=reducers)


def _direct(group: Group, flat: Array, kind: ElementType, op: Op, envelope: Envelope) -> None:
    """Everybody sends to everybody: one step however many ranks. All reduce in the order of the ranks, since not even a
    sum of two is the same both ways round (the payload of a NaN, the sign of a smallest zero)."""
    rank, n = group.rank, group.world_size
    reducer, block = reduction.reducer(op, kind), block_of(flat)
    total = np.empty(min(block, flat.size), flat.dtype)
    for start in range(0, max(flat.size, 1), block):
        own = flat[start : start + block]
        reduction.scale_before(op, kind, own)
        into = total[: own.size]
        if n == 2:
            _exchange(group, own, 1 - rank, into, reducer, envelope)
        else:
            for dst, _ in algorithms.exchange_order(rank, n):
                group.send(own, dst, envelope)
            for src in range(n):
                if src != rank:
                    group.recv(into, src, envelope, reducer if src else None)
                elif src == 0:
                    into[...] = own
                else:
                    reducer.apply(into, own)
        reduction.scale_after(op, kind, into, n)
        own[...] = into


def _doubling(group: Group, flat: Array, kind: ElementType, op: Op, envelope: Envelope) -> None:
    """Partners exchange all they have, at doubling distances."""
    rank, n = group.rank, group.world_size
    reducer = reduction.reducer(op, kind)
    reduction.scale_before(op, kind, flat)
    helper, partners = algorithms.doubling_all_reduce(rank, n)
    if helper is not None and not partners:
        group.send(flat, helper, envelope)
        group.recv(flat, helper, envelope)
        return
    if helper is not None:
        group.recv(flat, helper, envelope, reducer)
    both = np.empty_like(flat)
    for partner in partners:
        _exchange(group, flat, partner, both, reducer, envelope)
        flat[...] = both
    reduction.scale_after(op, kind, flat, n)
    if helper is not None:
        group.send(flat, helper, envelope)


def _exchange(group: Group, own: Array, partner: int, both: Array, reducer: Reducer, envelope: Envelope) -> None:
    """`both` becomes what this rank and its partner have, reduced. As above, the lower rank's elements come first."""
    if group.rank < partner:
        both[...] = own
        group.exchange(own, partner, both, partner, envelope, reducer)
    else:
        group.exchange(own, partner, both, partner, envelope)
        reducer.apply(both, own)
