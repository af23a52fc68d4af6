"""reduce: the root's array becomes the reduction of all ranks' arrays; the others keep theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ringfort.backends.group import Group
from ringfort.collectives import algorithms, cost_model, reduction
from ringfort.collectives.algorithms import Span, Step
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.ops import Op
from ringfort.collectives.parallel import over_connections
from ringfort.collectives.plan import Operation, Plan, Run, planned
from ringfort.collectives.signature import Collective, encode
from ringfort.collectives.steps import Memory, Reducers, block_of, run_steps
from ringfort.collectives.tensors import operation
from ringfort.config import ReduceStrategy, Shape, Strategy
from ringfort.transport.reducer import Array, Reducer


def reduce(
    group: Group, x: Any, root: int, op: Op, *, strategy: ReduceStrategy | None = None, timeout: float | None = None
) -> Operation:
    """The root's `x` becomes the reduction of all, in place; the others keep theirs."""
    group.check_rank(root, "root")
    asked = cost_model.check_strategy(strategy, group.config.collective.reduce)
    is_root = group.rank == root
    view = as_view(x, "x", writable=is_root)
    key = "reduce", view.kind, view.size, op, root, strategy
    plan = planned(group, key, lambda: _plan(group, view, root, op, asked))
    return operation(group, "reduce", view, plan, view.finish if is_root else lambda: x, timeout, view.flat)


def _plan(group: Group, view: ArrayView, root: int, op: Op, asked: ReduceStrategy) -> Plan:
    kind, rank, n, nbytes = view.kind, group.rank, group.world_size, view.nbytes
    reducer = reduction.reducer(op, kind)
    settled = cost_model.settle(group, asked, nbytes, kind.name)
    code = reduction.code_of(op)
    call = encode(Collective.REDUCE, kind=kind.code, count=view.size, op=code, root=root, strategy=settled)
    block = block_of(view.flat)

    def reducer_of(step: Step) -> Reducer | None:
        return reducer if step.reduces else None

    def decide(timeout: float | None) -> Run:
        chosen = cost_model.choose(group, settled, nbytes, kind.name, call, timeout)

        def run(flat: Array, timeout: float | None = None) -> None:
            envelope = group.envelope(call, timeout)
            if n == 1:
                reduction.scale_before(op, kind, flat)
                return

            def move(connection: Group, span: Span) -> None:
                part = flat[span[0] : span[1]]
                steps = algorithms.reduce_up(tree_links(chosen, connection, root, part), part.size, block)
                if rank == root:
                    run_steps(connection, steps, Memory(part), envelope, reducer=Reducers(op, kind, part, n))
                    return
                scratch = np.empty(min(2 * block, max(part.size, 1)), part.dtype)
                steps = _staged(steps, part, scratch, block, lambda copy: reduction.scale_before(op, kind, copy))
                first = envelope._replace(sync=True)
                run_steps(connection, steps, Memory(scratch), envelope, reducer=reducer_of, first=first)

            over_connections(group, flat, envelope, move)

        return run

    return Plan.undecided(decide)


def _staged(
    steps: Iterable[Step], flat: Array, scratch: Array, block: int, scale: Callable[[Array], None]
) -> Iterator[Step]:
    """A reduce's steps at a rank that keeps its array `flat`: each block is copied to `scratch`, which has room for
    two, and scaled before it is touched."""

    def place(span: Span) -> Span:
        start = span[0] % (2 * block)
        return start, start + span[1] - span[0]

    staged: Span | None = None
    for step in steps:
        span = step.into or step.out
        if span is not None and span != staged and (step.src is not None or staged is None or span[0] > staged[0]):
            staged = span
            copy = scratch[slice(*place(span))]
            copy[...] = flat[slice(*span)]
            scale(copy)
        out, into = (None if part is None else place(part) for part in (step.out, step.into))
        yield step._replace(out=out, into=into)


def tree_links(strategy: Strategy, group: Group, root: int, flat: Array) -> algorithms.TreePlace:
    """Whom this rank hears from and tells in a reduce or a broadcast: a ring is a tree of one child each, direct a tree
    of one level."""
    rank, n = group.rank, group.world_size
    if strategy.shape is Shape.HIERARCHICAL:
        return algorithms.host_links(rank, group.hosts, root, is_pipelined=flat.size > block_of(flat))
    arity = {Shape.RING: 1, Shape.TREE: strategy.arity}.get(strategy.shape, max(1, n - 1))
    return algorithms.tree_links(rank, n, root, arity)
