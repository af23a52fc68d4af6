"""broadcast: every rank's array becomes the root's."""

from __future__ import annotations

from typing import Any

from ringfort.backends.group import Group
from ringfort.collectives import algorithms, cost_model, native, shared_memory
from ringfort.collectives.algorithms import Span
from ringfort.collectives.arrays import ArrayView
from ringfort.collectives.parallel import over_connections
from ringfort.collectives.plan import Operation, Plan, Run, planned
from ringfort.collectives.reduce import tree_links
from ringfort.collectives.signature import Collective, encode
from ringfort.collectives.steps import Memory, block_of, run_steps
from ringfort.collectives.tensors import operation, view_for
from ringfort.config import BroadcastStrategy, Shape
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array


def broadcast(
    group: Group, x: Any, root: int = 0, *, strategy: BroadcastStrategy | None = None, timeout: float | None = None
) -> Operation:
    """Copy the root's `x` to every rank's `x`, in place."""
    group.check_rank(root, "root")
    asked = cost_model.check_strategy(strategy, group.config.collective.broadcast)
    is_root = group.rank == root
    view = view_for(group, x, writable=not is_root)
    key = "broadcast", view.kind, view.size, root, strategy, view.device
    plan = planned(group, key, lambda: _plan(group, view, root, asked))
    return operation(group, "broadcast", view, plan, (lambda: x) if is_root else view.finish, timeout, view.flat)


def _plan(group: Group, view: ArrayView, root: int, asked: BroadcastStrategy) -> Plan:
    kind, nbytes = view.kind, view.nbytes
    by_engine = native.broadcast(group, view, root) if native.may_use_engine(group, asked) else native.none_for(view)
    if by_engine is not None:
        return by_engine
    may_share = asked.shape is Shape.AUTO and group.shares_memory
    settled = cost_model.settle(group, asked, nbytes)
    told = None if may_share else settled
    call = encode(Collective.BROADCAST, kind=kind.code, count=view.size, root=root, strategy=told)

    def decide(timeout: float | None) -> Run:
        arena = group.arena(call, timeout) if may_share else None
        if arena is not None:

            def share(flat: Array, timeout: float | None = None) -> None:
                with arena:
                    shared_memory.broadcast(arena, flat, root, group.envelope(call, timeout))

            return share
        chosen = cost_model.choose(group, settled, nbytes, kind.name, call, timeout)

        def run(flat: Array, timeout: float | None = None) -> None:
            envelope = group.envelope(call, timeout)

            def move(connection: Group, span: Span) -> None:
                part = flat[span[0] : span[1]]
                spread(connection, part, tree_links(chosen, connection, root, part), envelope)

            over_connections(group, flat, envelope, move)

        return run

    return Plan.undecided(decide)


def spread(group: Group, flat: Array, links: algorithms.TreePlace, envelope: Envelope) -> None:
    """Move the root's elements to every rank's, down a tree."""
    steps = algorithms.broadcast_down(links, flat.size, block_of(flat))
    run_steps(group, steps, Memory(flat), envelope, first=envelope._replace(sync=True))
