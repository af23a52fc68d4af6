"""The collectives that compute: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ringfort.backends.base import Backend
from ringfort.collectives import auto, calls, kernels, plan
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.calls import Collective
from ringfort.collectives.kernels import ElementType
from ringfort.collectives.operation import Memory, Operation, check_root, run_steps
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.plan import Span
from ringfort.config import AllReduceStrategy, ReduceStrategy, Shape, Strategy
from ringfort.errors import InvalidArgumentError
from ringfort.transport.fold import Array, Fold
from ringfort.transport.messages import Envelope


def all_reduce(
    backend: Backend,
    x: Any,
    op: Op = ReduceOp.SUM,
    *,
    strategy: AllReduceStrategy | None = None,
    timeout: float | None = None,
) -> Operation:
    """Every rank's `x` becomes the reduction of all of them, in place."""
    view = as_view(x, "x", writable=True)
    fold = kernels.fold(op, view.kind)
    config, n = backend.config.collective, backend.world_size
    chosen = _resolve(strategy, AllReduceStrategy) or auto.choose_all_reduce(config, n, view.flat.nbytes)
    call = _call(Collective.ALL_REDUCE, view, op, chosen)
    backend.check_timeout(timeout)

    def run() -> Any:
        flat, kind = view.flat, view.kind
        envelope = backend.envelope(call, timeout)
        kernels.scale_before(op, kind, flat)
        if n == 1:
            return view.finish()
        if chosen.shape is Shape.DIRECT:
            _direct_all_reduce(backend, flat, kind, op, fold, envelope)
            return view.finish()
        if chosen.shape is Shape.HALVING_DOUBLING and flat.nbytes <= auto.DOUBLING_BYTES:
            _doubling_all_reduce(backend, flat, kind, op, fold, envelope)
            return view.finish()

        def finish(span: Span) -> None:
            kernels.scale_after(op, kind, flat[span[0] : span[1]], n)

        closing = finish if kernels.needs_scale_after(op) else None
        steps = _all_reduce_steps(backend, chosen, flat)
        run_steps(backend, steps, Memory(flat), envelope, fold=fold, finish=closing)
        return view.finish()

    return Operation("all_reduce", view.flat.nbytes, run)


def _all_reduce_steps(backend: Backend, strategy: Strategy, flat: Array) -> Iterable[plan.Step]:
    rank, n = backend.rank, backend.world_size
    if strategy.shape is Shape.RING:
        return plan.ring_all_reduce(rank, n, flat.size, backend.ring)
    if strategy.shape is Shape.HALVING_DOUBLING:
        return plan.halving_doubling_all_reduce(rank, n, flat.size)
    return plan.tree_all_reduce(rank, n, flat.size, strategy.arity, block_of(flat))


def _direct_all_reduce(
    backend: Backend, flat: Array, kind: ElementType, op: Op, fold: Fold, envelope: Envelope
) -> None:
    """Everybody sends to everybody: one step however many ranks. All fold in the order of the ranks, since not even a
    sum of two is the same both ways round (the payload of a NaN, the sign of a smallest zero)."""
    rank, n = backend.rank, backend.world_size
    block = block_of(flat)
    total = np.empty(min(block, flat.size), flat.dtype)
    for start in range(0, max(flat.size, 1), block):
        own = flat[start : start + block]
        into = total[: own.size]
        if n == 2:
            other = 1 - rank
            if rank == 0:
                into[...] = own
                backend.exchange(own, other, into, other, reduce=fold, tag=envelope)
            else:
                backend.exchange(own, other, into, other, tag=envelope)
                fold.apply(into, own)
        else:
            for dst, _ in plan.exchange_order(rank, n):
                backend.send(own, dst, tag=envelope)
            for src in range(n):
                if src != rank:
                    backend.recv(into, src, reduce=fold if src else None, tag=envelope)
                elif src == 0:
                    into[...] = own
                else:
                    fold.apply(into, own)
        kernels.scale_after(op, kind, into, n)
        own[...] = into


def _doubling_all_reduce(
    backend: Backend, flat: Array, kind: ElementType, op: Op, fold: Fold, envelope: Envelope
) -> None:
    """Partners exchange all they have, at doubling distances. As above, the lower rank's elements come first."""
    rank, n = backend.rank, backend.world_size
    helper, partners = plan.doubling_all_reduce(rank, n)
    if helper is not None and not partners:
        backend.send(flat, helper, tag=envelope)
        backend.recv(flat, helper, tag=envelope)
        return
    if helper is not None:
        backend.recv(flat, helper, reduce=fold, tag=envelope)
    both = np.empty_like(flat)
    for partner in partners:
        if rank < partner:
            both[...] = flat
            backend.exchange(flat, partner, both, partner, reduce=fold, tag=envelope)
        else:
            backend.exchange(flat, partner, both, partner, tag=envelope)
            fold.apply(both, flat)
        flat[...] = both
    kernels.scale_after(op, kind, flat, n)
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
    fold = kernels.fold(op, view.kind)
    chosen = _resolve(strategy, ReduceStrategy) or auto.choose_reduce(backend.config.collective, n, view.flat.nbytes)
    call = _call(Collective.REDUCE, view, op, chosen, root)
    backend.check_timeout(timeout)

    def run() -> Any:
        flat, kind = view.flat, view.kind
        envelope = backend.envelope(call, timeout)
        block = block_of(flat)
        arity = fan_out(chosen, n)
        steps = plan.tree_reduce(rank, n, root, flat.size, arity, block)
        if rank == root:
            kernels.scale_before(op, kind, flat)
            run_steps(backend, steps, Memory(flat), envelope, fold=fold)
            kernels.scale_after(op, kind, flat, n)
            return view.finish()
        steps = _Staged(flat, kind, op, block, steps)
        run_steps(backend, steps, steps.memory, envelope, fold=fold, first=envelope._replace(sync=True))
        return x

    return Operation("reduce", view.flat.nbytes, run)


class _Staged:
    """A reduce's steps at a rank that keeps its array: a block is copied to a scratch of two before it is touched."""

    def __init__(self, flat: Array, kind: ElementType, op: Op, block: int, steps: Iterable[plan.Step]) -> None:
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
                kernels.scale_before(self._op, self._kind, copy)
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
    view = as_view(x, "x")
    check_parts(view, n)
    fold = kernels.fold(op, view.kind)
    call = _call(Collective.REDUCE_SCATTER, view, op)
    backend.check_timeout(timeout)

    def run() -> Any:
        envelope = backend.envelope(call, timeout)
        result = view.new(view.shape[1:])
        flat, kind = result.flat, view.kind
        flat[...] = view.part(rank)
        kernels.scale_before(op, kind, flat)
        # What a rank sends must be scaled too, and `x` kept: then block by block, through a copy.
        scaled = kernels.needs_scale_before(op)
        block = block_of(flat) if scaled else max(flat.size, 1)
        for dst, src in plan.exchange_order(rank, n):
            part = view.part(dst)
            for start in range(0, max(flat.size, 1), block):
                out = part[start : start + block]
                if scaled:
                    out = out.copy()
                    kernels.scale_before(op, kind, out)
                backend.exchange(out, dst, flat[start : start + block], src, reduce=fold, tag=envelope)
        kernels.scale_after(op, kind, flat, n)
        return result.finish()

    return Operation("reduce_scatter", view.flat.nbytes, run)


def block_of(flat: Array) -> int:
    """Elements in a block of a pipelined plan."""
    return max(1, auto.BLOCK_BYTES // flat.itemsize)


def fan_out(strategy: Strategy, world_size: int) -> int:
    """The children of a node: a ring is a tree of one child each, direct a tree of one level."""
    if strategy.shape is Shape.RING:
        return 1
    return strategy.arity if strategy.shape is Shape.TREE else max(1, world_size - 1)


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
    return calls.encode(
        what, kind=view.kind.code, count=view.flat.size, op=kernels.code_of(op), root=root, strategy=strategy
    )
