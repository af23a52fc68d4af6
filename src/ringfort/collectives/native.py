"""Plans that use another engine's own collectives (Gloo, MPI, NCCL), where it gives the same result as ours would. Each
function returns a plan, or None: then the collective runs our way, over messages. An engine that works inside each host
only does its part there; between the hosts it is ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringfort.backends.engines.native import ByHost, Native, Pending
from ringfort.backends.group import Group
from ringfort.collectives import reduction
from ringfort.collectives.arrays import ArrayView
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.parts import Parts
from ringfort.collectives.plan import Operation, Plan
from ringfort.collectives.reduction import ElementType
from ringfort.collectives.signature import Collective, encode
from ringfort.collectives.tensors import scale_after, scale_before
from ringfort.config import Shape, Strategy
from ringfort.errors import UnsupportedArrayError
from ringfort.transport.messages import Envelope


def all_reduce(group: Group, view: ArrayView, op: Op) -> Plan | None:
    """Every rank's array becomes the reduction of all of them, in place."""
    native, name = group.native, reduction.summed(op)
    if native is None or not _suits(native, group, "all_reduce", view, name):
        return none_for(view)
    call = _call(Collective.ALL_REDUCE, view, op)
    if native.by_host is not None:
        return _all_reduce_by_host(group, native, native.by_host, op, view.kind, name, call)

    def begin(flat: Any) -> Pending:
        scale_before(op, view.kind, flat)
        return native.all_reduce(flat, name)

    def finish(flat: Any) -> None:
        scale_after(op, view.kind, flat, group.world_size)

    return _plan(group, native, call, begin, finish)


def reduce_scatter(group: Group, view: ArrayView, op: Op) -> Plan | None:
    """`view` has a part for each rank; the result is the reduction of this rank's parts."""
    native, name = group.native, reduction.summed(op)
    if native is None or not _suits(native, group, "reduce_scatter", view, name):
        return none_for(view)

    def begin(parts: Parts, into: Any) -> Pending:
        source = parts.whole
        assert source is not None
        if reduction.needs_scale_before(op):  # of a copy, for `x` is kept
            copy = source.new(source.shape)
            copy.flat[...] = source.flat
            scale_before(op, view.kind, copy.flat)
            source = copy
        return native.reduce_scatter(source.flat, into, name)

    def finish(parts: Parts, into: Any) -> None:
        scale_after(op, view.kind, into, group.world_size)

    return _plan(group, native, _call(Collective.REDUCE_SCATTER, view, op), begin, finish)


def broadcast(group: Group, view: ArrayView, root: int) -> Plan | None:
    """Every rank's array becomes the root's, in place."""
    native = group.native
    if native is None or not _suits(native, group, "broadcast", view):
        return none_for(view)
    call = _call(Collective.BROADCAST, view, root=root)
    if native.by_host is not None:
        return _broadcast_by_host(group, native, native.by_host, root, call)

    def begin(flat: Any) -> Pending:
        return native.broadcast(flat, root)

    return _plan(group, native, call, begin)


def all_gather(group: Group, view: ArrayView) -> Plan | None:
    """Return a new array of shape `(world_size, *x.shape)` with every rank's array."""
    native = group.native
    if native is None or not _suits(native, group, "all_gather", view):
        return none_for(view)

    def begin(flat: Any, into: Parts) -> Pending:
        assert into.whole is not None
        return native.all_gather(flat, into.whole.flat)

    return _plan(group, native, _call(Collective.ALL_GATHER, view), begin)


def all_to_all(group: Group, view: ArrayView) -> Plan | None:
    """Part i of rank j's array becomes part j of rank i's result."""
    native = group.native
    if native is None or not _suits(native, group, "all_to_all", view):
        return none_for(view)
    return _plan(group, native, _call(Collective.ALL_TO_ALL, view), native.all_to_all)


def none_for(view: ArrayView) -> None:
    """Return None: no engine runs this collective, so one of our own plans does. Raise `UnsupportedArrayError` if the
    array is on a device, where our plans cannot reach it."""
    if view.device is not None:
        raise UnsupportedArrayError("x", f"tensor on {view.device}", "must be a dense tensor on the CPU; pass x.cpu()")


def _plan(
    group: Group,
    native: Native,
    call: bytes,
    begin: Callable[..., Pending],
    finish: Callable[..., None] | None = None,
) -> Plan:
    def run(*arguments: Any, timeout: float | None = None) -> None:
        native.run(lambda: begin(*arguments), group.envelope(call, timeout))
        if finish is not None:
            finish(*arguments)

    return Plan(run)


def may_use_engine(group: Group, asked: Strategy) -> bool:
    """Return whether an engine may run the collective: if no strategy was asked for, or if the engine works inside each
    host, as the hierarchical strategy does."""
    return asked.shape is Shape.AUTO or (group.native is not None and group.native.by_host is not None)


def _suits(native: Native, group: Group, what: str, view: ArrayView, op: str = "") -> bool:
    if native.tensors_on:  # tensors on a device are for this engine alone
        return view.device is not None and native.takes(what, view.kind.name, op)
    least = group.config.collective.native_bytes
    return least is not None and view.nbytes >= max(1, least) and native.takes(what, view.kind.name, op)


def _call(what: Collective, view: ArrayView, op: Op | None = None, root: int = 0) -> bytes:
    code = 0 if op is None else reduction.code_of(op)
    return encode(what, kind=view.kind.code, count=view.size, op=code, root=root)


# --- host by host: the engine inside each, our links between their first ranks, through the memory of the CPU ---------


def _all_reduce_by_host(
    group: Group, native: Native, hosts: ByHost, op: Op, kind: ElementType, name: str, call: bytes
) -> Plan:
    from ringfort.collectives.all_reduce import all_reduce as our_all_reduce  # which asks here first

    def run(tensor: Any, timeout: float | None = None) -> None:
        envelope = group.envelope(call, timeout)
        group.meet(envelope)
        scale_before(op, kind, tensor)
        _inside(native, hosts, lambda: native.reduce(tensor, 0, name), envelope)
        _between(hosts, tensor, lambda between, x: our_all_reduce(between, x, ReduceOp[name], timeout=timeout))
        _inside(native, hosts, lambda: native.broadcast(tensor, 0), envelope)
        scale_after(op, kind, tensor, group.world_size)

    return Plan(run)


def _broadcast_by_host(group: Group, native: Native, hosts: ByHost, root: int, call: bytes) -> Plan:
    from ringfort.collectives.broadcast import broadcast as our_broadcast  # which asks here first

    def run(tensor: Any, timeout: float | None = None) -> None:
        envelope = group.envelope(call, timeout)
        group.meet(envelope)
        if group.hosts[root] == group.hosts[group.rank]:
            place = hosts.local.members.index(group.members[root])
            _inside(native, hosts, lambda: native.broadcast(tensor, place), envelope)
        first = sorted(set(group.hosts)).index(group.hosts[root])
        _between(hosts, tensor, lambda between, x: our_broadcast(between, x, first, timeout=timeout))
        _inside(native, hosts, lambda: native.broadcast(tensor, 0), envelope)

    return Plan(run)


def _inside(native: Native, hosts: ByHost, begin: Callable[[], Pending], envelope: Envelope) -> None:
    if hosts.local.world_size > 1:
        native.carry(begin, envelope)


def _between(hosts: ByHost, tensor: Any, prepare: Callable[[Group, Any], Operation]) -> None:
    """Do what `prepare` prepares for the first ranks of the hosts, with a copy in the memory of the CPU."""
    if hosts.between is not None and hosts.between.world_size > 1:
        copy = tensor.cpu()
        prepare(hosts.between, copy).run()
        tensor.copy_(copy)
